"""Forms of answers, and embeddings of texts, with ``LLM``."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxinfer import LLM, SamplingParams
from jaxinfer.request import RequestError
from tests.engine.test_structured_schemas import validate
from tests.models.tiny_checkpoints import save
from tests.structured.schemas import SCHEMAS


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A random Llama with a byte-level tokenizer of 320 tokens, all pieces of bytes but the first three."""
    folder = tmp_path_factory.mktemp("llama")
    save("llama", folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *letters, "tr", "ue", "true"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "r"), ("u", "e"), ("tr", "ue")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return LLM(
        str(folder),
        dtype="float32",
        max_model_len=64,
        cache={"block_size": 4, "num_blocks": 64},
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 16},
        compile={"warm_up": "lazy", "cache_dir": "none"},
    )


@pytest.mark.feature("structured output", "Llama", "sampling", "tokenizer", "stop strings and ids")
def test_generate_with_forms_of_all_kinds(llm: LLM) -> None:
    forms = [
        {"json": SCHEMAS["integer-range"]},
        {"json": SCHEMAS["enum-unicode"]},
        {"json": SCHEMAS["date"]},
        {"regex": "[a-c]{3}true"},
        {"choice": ["yes", "no"]},
        {"grammar": 'start: "(" start ")" | "x"'},
    ]
    params = [SamplingParams(seed=i, max_tokens=50, structured_outputs=f) for i, f in enumerate(forms)]
    params.append(SamplingParams(seed=9, max_tokens=20))
    outputs = llm.generate(["some prompt"] * len(params), params, progress=False)
    texts = [output.outputs[0].text for output in outputs]
    assert [output.outputs[0].finish_reason for output in outputs[:6]] == ["stop"] * 6
    for text, form in zip(texts[:3], forms[:3], strict=True):
        validate(text, form["json"])
    assert texts[3].endswith("true")
    assert len(texts[3]) == 7
    assert texts[4] in ("yes", "no")
    assert texts[5].strip("()") == "x"
    plain = llm.generate("some prompt", params[-1], progress=False)
    assert plain[0].outputs[0].token_ids == outputs[-1].outputs[0].token_ids


@pytest.mark.feature("structured output")
def test_a_bad_form_is_refused_and_nothing_runs(llm: LLM) -> None:
    good = SamplingParams(structured_outputs={"choice": ["a"]})
    bad = SamplingParams(structured_outputs={"json": {"uniqueItems": True}})
    with pytest.raises(RequestError, match="uniqueItems"):
        llm.generate(["a", "b"], [good, bad], progress=False)
    assert llm.engine.core.num_requests == 0


@pytest.mark.feature("pooling", "Llama", "tokenizer")
def test_embed_texts(llm: LLM) -> None:
    first, second, again = llm.embed(["one text", "another", "one text"], progress=False)
    assert first.shape == (64,)
    np.testing.assert_allclose(first, again, atol=1e-5)
    assert np.abs(first - second).max() > 0.01
