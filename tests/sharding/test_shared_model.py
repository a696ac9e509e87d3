"""A model shared by four devices gives the tokens and log-probabilities of one device, whatever the schedule.

Two devices share the experts and two their width; all four share heads, of which there are more than KV heads, and the
vocabulary, of which the last device has nothing.
"""

from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.engine.build import Engine
from jaxinfer.engine.snapshots import take_snapshot
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenization.tokenizer import Tokenizer
from sharding.mesh import make_layout
from tests.engine.test_invariance_tiny_lm import PARAMS, PROMPTS, Seen
from tests.support.engines import Job, ids, run
from tests.support.tiny_models import TinyModel, prompt_ids, sparse_model, tiny_settings
from tests.support.tokenizers import ByteTokenizer

BOUND = 1e-4
JOBS = [Job(ids(prompt), params, at=at) for at, (prompt, params) in enumerate(zip(PROMPTS, PARAMS))]
NGRAM = SpeculativeConfig(drafter="ngram", max_drafts=5, max_step_drafts=12, ngram_shortest=1)
PAIRED = ("tensor parallel", "expert parallel", "logprobs", "seeds")


def engine_of(model: TinyModel, tokenizer: Tokenizer | None = None, **options: Any) -> Engine:
    """Steps of eight tokens, in programs of one shape; prompts take several of them."""
    settings = tiny_settings(max_num_batched_tokens=8, **options)
    return model.engine(settings, tokenizer=tokenizer, one_bucket=True)


@pytest.fixture(scope="module", params=[None, pytest.param(8, marks=pytest.mark.slow)])
def shared(request: pytest.FixtureRequest) -> TinyModel:
    """Its parameter: the rows from which on the devices exchange them in sparse layers."""
    return sparse_model(make_layout(jax.devices(), 2, 2, exchange_from=request.param))


@pytest.fixture(scope="module")
def expected() -> list[Seen]:
    return [
        Seen.of(output) for output in run(engine_of(sparse_model(), prefix_caching=False, overlap=0), JOBS)
    ]


@pytest.mark.feature(*PAIRED, "chunked prefill", "overlap", "preemption", "sampling", "penalties")
@pytest.mark.parametrize(
    "options", [{"chunk_size": 5}, {"num_blocks": 14, "prefix_caching": False, "overlap": 0}], ids=str
)
def test_chunks_and_preemption(shared: TinyModel, expected: list[Seen], options: dict[str, Any]) -> None:
    engine = engine_of(shared, **options)
    for output, want in zip(run(engine, JOBS), expected, strict=True):
        Seen.of(output).assert_close(want, BOUND)
    assert "num_blocks" not in options or engine.core.stats.preemptions > 0


@pytest.mark.feature(*PAIRED[:2], "chunked prefill", "metrics")
def test_tokens_of_experts_are_counted_once(shared: TinyModel) -> None:
    """What devices share is counted as on one device; a token counts for the two experts that it gets in each layer."""
    counted = []
    for model in (sparse_model(), shared):
        stats, compilations = (engine := engine_of(model, chunk_size=5)).core.stats, engine.compilations
        assert take_snapshot(engine.core, compilations).expert_tokens == ()
        run(engine, JOBS)
        assert stats.sparse_layers == (0, 1)
        assert stats.expert_tokens_LE.sum(axis=1).tolist() == [2 * stats.computed_tokens] * 2
        snapshot = take_snapshot(engine.core, compilations)
        assert sum(snapshot.expert_tokens) == 4 * stats.computed_tokens
        assert all(
            stats.expert_tokens_LE[layer].max() <= tokens <= stats.computed_tokens
            for layer, tokens in snapshot.expert_peak_tokens.items()
        )
        counted.append(stats.expert_tokens_LE)
    np.testing.assert_array_equal(*counted)


@pytest.mark.feature(*PAIRED, "prefix cache")
def test_prefix_hits(shared: TinyModel, expected: list[Seen]) -> None:
    engine = engine_of(shared)
    for _ in range(2):
        again = run(engine, JOBS)
        for output, want in zip(again, expected, strict=True):
            Seen.of(output).assert_close(want, BOUND)
    assert all(output.num_cached_tokens > 0 for output in again)


@pytest.mark.slow
@pytest.mark.feature(*PAIRED, "n-gram speculation")
def test_drafts(shared: TinyModel, expected: list[Seen]) -> None:
    engine = engine_of(shared, speculative=NGRAM)
    for output, want in zip(run(engine, JOBS), expected, strict=True):
        Seen.of(output).assert_close(want, BOUND)
    assert engine.core.stats.drafted_tokens > 0


@pytest.mark.feature(*PAIRED, "token exchange", "chunked prefill", "overlap", "preemption", "sampling")
def test_exchanged_rows(expected: list[Seen]) -> None:
    engine = engine_of(
        sparse_model(make_layout(jax.devices(), 2, 2, exchange_from=8)),
        num_blocks=14,
        prefix_caching=False,
        chunk_size=5,
    )
    for output, want in zip(run(engine, JOBS), expected, strict=True):
        Seen.of(output).assert_close(want, BOUND)
    assert engine.core.stats.preemptions > 0


@pytest.mark.feature(*PAIRED[:2], "structured output")
def test_grammars(shared: TinyModel) -> None:
    tokenizer = ByteTokenizer()
    schema = {"enum": ["red", "green", [1, 2, 3]]}
    jobs = [
        Job(
            ids(prompt_ids(7, seed)),
            SamplingParams(seed=seed, max_tokens=24, structured_outputs={"json": schema}),
        )
        for seed in range(3)
    ]
    texts = [
        [output.outputs[0].text for output in run(engine_of(model, tokenizer), jobs)]
        for model in (sparse_model(), shared)
    ]
    assert texts[0] == texts[1]
    assert set(texts[0]) <= {'"red"', '"green"'} or all(text for text in texts[0])


def test_each_device_holds_its_share(shared: TinyModel) -> None:
    """Nothing but norms and routers is whole on every device."""
    for path, weight in shared.params.items():
        pieces = {tuple((s.start, s.stop) for s in shard.index) for shard in weight.addressable_shards}
        whole = "norm" in path or "router" in path
        assert len(pieces) == (1 if whole else 4), path
        assert len(weight.addressable_shards) == 4
