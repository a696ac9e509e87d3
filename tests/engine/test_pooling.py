"""Embeddings: pooled hidden states of prompts."""

from itertools import product

import numpy as np
import pytest
import torch

from jaxinfer import LLM
from jaxinfer.request import RequestError
from jaxinfer.sampling_params import SamplingParams
from tests.models.tiny_checkpoints import prompt, save
from tests.support.engines import Driver, config, scripted, static_script
from tests.support.tokenizers import ByteTokenizer
from tests.support.variants import variants

pytestmark = pytest.mark.feature("pooling")
PROMPTS = [prompt(length, seed) for seed, length in enumerate((19, 5, 1, 27))]


@pytest.fixture(scope="module")
def model_and_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return save("llama", folder), str(folder)


def load(folder: str, num_blocks: int = 64, **scheduler) -> LLM:
    return LLM(
        folder,
        dtype="float32",
        tokenizer="none",
        max_model_len=48,
        cache={"block_size": 4, "num_blocks": num_blocks},
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 8, **scheduler},
        compile={"warm_up": "lazy", "cache_dir": "none"},
    )


def expected(model: torch.nn.Module, pooling: str) -> list[np.ndarray]:
    vectors = []
    for tokens in PROMPTS:
        with torch.no_grad():
            states_TD = model.model(torch.tensor([tokens])).last_hidden_state[0].numpy()
        vectors.append(states_TD.mean(0) if pooling == "mean" else states_TD[-1])
    return vectors


@pytest.mark.feature("Llama", "chunked prefill", "prefix cache", "overlap")
@pytest.mark.parametrize(
    ("pooling", "overlap"),
    variants(product(["mean", "last"], [0, 1]), quick=[("mean", 0), ("last", 1)]),
)
def test_embeddings_equal_transformers(model_and_folder, pooling, overlap):
    """Chunks of at most 8 tokens; the second round finds the blocks of the first in the cache, which only ``last``
    reads."""
    model, folder = model_and_folder
    llm = load(folder, overlap=overlap)
    prompts = [{"prompt_token_ids": list(tokens)} for tokens in PROMPTS]
    for _ in range(2):
        vectors = llm.embed(prompts, pooling=pooling, progress=False)
        for vector, wanted in zip(vectors, expected(model, pooling), strict=True):
            assert vector.dtype == np.float32
            np.testing.assert_allclose(vector, wanted, atol=1e-4)
    hits = llm.engine.core.stats.prefix_hit_tokens
    assert hits == 0 if pooling == "mean" else hits > 0


def test_together_with_generation(model_and_folder):
    model, folder = model_and_folder
    llm = load(folder)
    params = SamplingParams(temperature=0, max_tokens=6, detokenize=False, ignore_eos=True)
    (alone,) = llm.generate({"prompt_token_ids": list(PROMPTS[0])}, params)
    driver = Driver(llm.engine)
    driver.add("text", {"prompt_token_ids": list(PROMPTS[0])}, params)
    inputs, core = llm.engine.inputs, llm.engine.core
    core.add(inputs.process("vector", {"prompt_token_ids": list(PROMPTS[3])}, params, pooling="mean"))
    deltas = []
    while core.has_work:
        deltas += core.step()
        core.check_integrity()
    (vector,) = [d for d in deltas if d.request_id == "vector"]
    np.testing.assert_allclose(vector.embedding, expected(model, "mean")[3], atol=1e-4)
    assert vector.finish_reason == "stop"
    assert vector.token_ids == ()
    tokens = [t for d in deltas if d.request_id == "text" for t in d.token_ids]
    assert tokens == alone.outputs[0].token_ids


@pytest.mark.feature("preemption", "chunked prefill")
@pytest.mark.parametrize("num_blocks", [64, 9])
def test_a_scripted_engine_answers_with_any_vector(num_blocks):
    """The same for every schedule; different for different texts."""
    engine = scripted(
        static_script({65: 1.0}), config(num_blocks=num_blocks, chunk_size=3), tokenizer=ByteTokenizer()
    )
    for i, text in enumerate(["hello world", "hello there", "hello world"]):
        engine.core.add(engine.inputs.process(f"v{i}", text, SamplingParams(), pooling="mean"))
        engine.core.add(engine.inputs.process(f"t{i}", text, SamplingParams(max_tokens=15)))
    found = {}
    while engine.core.has_work:
        for delta in engine.core.step():
            if delta.embedding is not None:
                found[delta.request_id] = delta.embedding
        engine.core.check_integrity()
    assert found["v0"] == pytest.approx(found["v2"])
    assert found["v0"] != pytest.approx(found["v1"])
    assert (engine.core.stats.preemptions > 0) == (num_blocks == 9)


def test_an_unknown_pooling_is_refused(model_and_folder):
    with pytest.raises(RequestError, match="pooling is 'max'; allowed: mean, last"):
        load(model_and_folder[1]).embed("x", pooling="max")  # type: ignore[arg-type]
