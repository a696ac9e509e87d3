"""Devices that share the slots of the cache give what one device gives, whatever the schedule.

Of four devices two share every context and two the heads; all four share MLPs, experts and the vocabulary. One layer
has a sliding window. All engines have one plan, with room for trees of drafts.
"""

from dataclasses import replace
from typing import Any

import jax
import pytest

from jaxinfer.engine.build import Engine
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.speculation import Speculation
from jaxinfer.tokenization.tokenizer import Tokenizer
from sharding.layout import ONE_DEVICE, Layout
from sharding.mesh import make_layout
from tests.engine.test_invariance_tiny_lm import COMMON, PROMPTS, Seen
from tests.sharding.test_shared_model import BOUND, JOBS
from tests.speculative.test_trees import SPECULATIVE, Bush
from tests.support.engines import Job, ids, run
from tests.support.latent_model import latent_model
from tests.support.tiny_models import (
    MAX_MODEL_LEN,
    MIXED,
    TinyModel,
    make_model,
    prompt_ids,
    sparse_model,
    tiny_settings,
)
from tests.support.tokenizers import ByteTokenizer

ONE_TOKEN = SPECULATIVE.model_copy(update={"ngram_shortest": 1})
PAIRED = ("context parallel", "tensor parallel", "expert parallel", "logprobs", "seeds", "sampling", "greedy")


def windowed(layout: Layout = ONE_DEVICE) -> TinyModel:
    return make_model(replace(sparse_model().config, windows=MIXED), 0, layout)


@pytest.fixture(scope="module")
def alone() -> TinyModel:
    return windowed()


@pytest.fixture(scope="module")
def shared() -> TinyModel:
    return windowed(make_layout(jax.devices(), tensor=2, expert=1, context=2))


def engine_of(
    model: TinyModel, drafter: Any = None, tokenizer: Tokenizer | None = None, **options: Any
) -> Engine:
    """Steps of eight tokens, in programs of one shape; prompts take several of them."""
    settings = tiny_settings(max_num_batched_tokens=8, speculative=ONE_TOKEN, **options)
    engine = model.engine(settings, tokenizer=tokenizer, one_bucket=True)
    if drafter != "ngram":
        engine.core.speculation = drafter and Speculation(
            drafter, *SPECULATIVE.draft_limits, trees=True, max_model_len=MAX_MODEL_LEN
        )
    return engine


@pytest.fixture(scope="module")
def expected(alone: TinyModel) -> list[Seen]:
    return [Seen.of(output) for output in run(engine_of(alone, prefix_caching=False, overlap=0), JOBS)]


def assert_same(engine: Engine, expected: list[Seen]) -> None:
    for output, want in zip(run(engine, JOBS), expected, strict=True):
        Seen.of(output).assert_close(want, BOUND)


@pytest.mark.feature(*PAIRED, "chunked prefill", "preemption", "penalties", "sliding window")
def test_chunks_and_preemption(shared: TinyModel, expected: list[Seen]) -> None:
    engine = engine_of(shared, chunk_size=5, num_blocks=14, prefix_caching=False)
    assert_same(engine, expected)
    assert engine.core.stats.preemptions > 0


@pytest.mark.feature(*PAIRED, "prefix cache", "overlap", "sliding window")
def test_prefix_hits(shared: TinyModel, expected: list[Seen]) -> None:
    """Whole blocks are found again, and the block in which two prompts part is copied."""
    engine = engine_of(shared)
    for _ in range(2):
        assert_same(engine, expected)
    assert engine.core.stats.prefix_hit_tokens > 40


@pytest.mark.feature(*PAIRED, "draft tree speculation", "chunked prefill", "preemption")
def test_trees_of_drafts(shared: TinyModel, expected: list[Seen]) -> None:
    """Accepted drafts are moved between slots of different devices."""
    coming = {tuple(prompt): seen.tokens for prompt, seen in zip(PROMPTS, expected)}
    engine = engine_of(shared, Bush(coming), chunk_size=6, num_blocks=14)
    assert_same(engine, expected)
    assert engine.core.stats.accepted_tokens > 15


@pytest.mark.feature(*PAIRED, "n-gram speculation")
def test_n_gram_drafts(shared: TinyModel, alone: TinyModel) -> None:
    job = Job(ids(prompt_ids(7) * 3), SamplingParams(temperature=0, **{**COMMON, "max_tokens": 24}))
    (want,) = run(engine_of(alone), [job])
    engine = engine_of(shared, "ngram")
    (got,) = run(engine, [job])
    Seen.of(got).assert_close(Seen.of(want), BOUND)
    assert engine.core.stats.drafted_tokens > 0


@pytest.mark.feature("context parallel", "tensor parallel", "n > 1", "seeds")
def test_choices_share_the_prompt(shared: TinyModel, alone: TinyModel) -> None:
    job = Job(ids(prompt_ids(9, 2)), SamplingParams(n=3, temperature=1, **COMMON))
    texts = [
        [choice.token_ids for choice in run(engine_of(model), [job])[0].outputs] for model in (alone, shared)
    ]
    assert texts[0] == texts[1]
    assert len(set(map(tuple, texts[0]))) == 3


@pytest.mark.feature("context parallel", "tensor parallel", "structured output", "seeds")
def test_grammars(shared: TinyModel, alone: TinyModel) -> None:
    schema = {"enum": ["red", "green", [1, 2, 3]]}
    jobs = [
        Job(
            ids(prompt_ids(7, seed)),
            SamplingParams(seed=seed, max_tokens=24, structured_outputs={"json": schema}),
        )
        for seed in range(3)
    ]
    texts = [
        [output.outputs[0].text for output in run(engine_of(model, tokenizer=ByteTokenizer()), jobs)]
        for model in (alone, shared)
    ]
    assert texts[0] == texts[1]
    assert all(texts[0])


@pytest.mark.feature("context parallel", "tensor parallel")
def test_each_device_holds_its_slots(shared: TinyModel, alone: TinyModel) -> None:
    """Half the heads and half the slots of every block; of the weights all but q, k and v are shared by all four."""
    for kv, whole in zip(engine_of(shared).runner.kv_cache, engine_of(alone).runner.kv_cache):
        N, K, S, h = whole.k_NKSh.shape
        for pool in (kv.k_NKSh, kv.v_NKSh):
            assert [shard.data.shape for shard in pool.addressable_shards] == [(N, K // 2, S // 2, h)] * 4
            assert len({str(shard.index) for shard in pool.addressable_shards}) == 4
    for path, weight in shared.params.items():
        pieces = {tuple((s.start, s.stop) for s in shard.index) for shard in weight.addressable_shards}
        whole = "norm" in path or "router" in path
        assert len(pieces) == (1 if whole else 2 if "qkv" in path else 4), path


@pytest.mark.slow
@pytest.mark.feature(*PAIRED, "chunked prefill", "prefix cache", "draft tree speculation")
@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 1, 4), (2, 1, 4), (1, 2, 2), (2, 2, 2)], ids=str)
def test_other_meshes(sizes: tuple[int, int, int], expected: list[Seen]) -> None:
    """Tensor, expert and context; with four devices a block has one slot on each."""
    model = windowed(make_layout(jax.devices(), *sizes))
    for _ in range(2):
        assert_same(engine_of(model), expected)
    coming = {tuple(prompt): seen.tokens for prompt, seen in zip(PROMPTS, expected)}
    assert_same(engine_of(model, Bush(coming), chunk_size=5), expected)


@pytest.mark.slow
@pytest.mark.feature(*PAIRED, "DeepseekV3", "chunked prefill", "prefix cache", "draft tree speculation")
@pytest.mark.parametrize("sizes", [(1, 1, 4), (2, 1, 2), (1, 2, 2)], ids=str)
def test_latents(sizes: tuple[int, int, int]) -> None:
    """Latents are one head, which devices without a context axis all hold."""
    want = [Seen.of(output) for output in run(engine_of(latent_model(), prefix_caching=False), JOBS)]
    model = latent_model(make_layout(jax.devices(), *sizes))
    engine = engine_of(model)
    for _ in range(2):
        assert_same(engine, want)
    coming = {tuple(prompt): seen.tokens for prompt, seen in zip(PROMPTS, want)}
    assert_same(engine_of(model, Bush(coming), chunk_size=5), want)
    for pool in (engine.runner.kv_cache[0].k_NKSh, engine.runner.kv_cache[0].v_NKSh):
        assert {shard.data.shape[2] for shard in pool.addressable_shards} == {4 // sizes[2]}
