"""Latent attention through the engine: what the cache, the schedule and drafts do, they do with latents too.

Every run is compared with one of each request alone, without prefix cache, chunks, drafts or preemption; that one is
compared with ``transformers`` in test_families_end_to_end.py. All engines share their programs.
"""

from typing import Any

import numpy as np
import pytest

from jaxinfer.engine.build import Engine
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.speculation import Speculation
from tests.engine.test_invariance_tiny_lm import BOUND, COMMON, PARAMS, PROMPTS, Seen
from tests.speculative.test_trees import SPECULATIVE, Bush
from tests.support.engines import Job, ids, run
from tests.support.latent_model import latent_model
from tests.support.tiny_models import MAX_MODEL_LEN, TinyModel, prompt_ids, tiny_settings

pytestmark = pytest.mark.feature("DeepseekV3")

COLD = {"prefix_caching": False, "overlap": 0}
CHOICES = SamplingParams(n=3, temperature=1, **COMMON)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return latent_model()


def make(model: TinyModel, drafter: Bush | None = None, **options: Any) -> Engine:
    """An engine of the one plan of these tests, which has room for trees."""
    engine = model.engine(tiny_settings(speculative=SPECULATIVE, **options))
    engine.core.speculation = drafter and Speculation(
        drafter, *SPECULATIVE.draft_limits, trees=True, max_model_len=MAX_MODEL_LEN
    )
    return engine


def together(engine: Engine) -> list[RequestOutput]:
    return run(engine, [Job(ids(prompt), params) for prompt, params in zip(PROMPTS, PARAMS)])


@pytest.fixture(scope="module")
def solo(model: TinyModel) -> list[Seen]:
    return [
        Seen.of(run(make(model, **COLD), [Job(ids(prompt), params)])[0])
        for prompt, params in zip(PROMPTS, PARAMS)
    ]


@pytest.mark.feature("continuous batching", "seeds", "logprobs", "sampling", "greedy")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"overlap": 1}, marks=pytest.mark.feature("overlap", "prefix cache")),
        pytest.param({"chunk_size": 5}, marks=[pytest.mark.feature("chunked prefill"), pytest.mark.slow]),
        pytest.param(
            {"num_blocks": 12, "chunk_size": 6}, marks=pytest.mark.feature("chunked prefill", "preemption")
        ),
    ],
    ids=str,
)
def test_the_same_together_as_alone(model, solo, options):
    engine = make(model, **options)
    for output, want in zip(together(engine), solo):
        Seen.of(output).assert_close(want, BOUND)
    assert (engine.core.stats.preemptions > 0) is ("num_blocks" in options)


@pytest.mark.feature("prefix cache", "logprobs")
def test_hits_read_what_was_written(model, solo):
    """The same prompts again: whole blocks are shared, and the block in which two prompts part is copied."""
    engine = make(model)
    together(engine)
    again = together(engine)
    assert sum(output.num_cached_tokens for output in again) > 40
    for output, want in zip(again, solo):
        Seen.of(output).assert_close(want, BOUND)


@pytest.mark.feature("n > 1", "preemption", "prefix cache", "seeds")
def test_choices_share_the_prompt(model):
    def choices(engine: Engine, others: list[Job]) -> list[list[int]]:
        output = run(engine, [Job(ids(PROMPTS[1]), CHOICES), *others])[0]
        return [choice.token_ids for choice in output.outputs]

    want = choices(make(model, **COLD), [])
    assert len({tuple(tokens) for tokens in want}) == 3
    crowded = make(model, num_blocks=14)
    assert choices(crowded, [Job(ids(PROMPTS[0]), PARAMS[0])]) == want
    assert crowded.core.stats.preemptions > 0


@pytest.mark.feature("draft tree speculation", "logprobs", "sampling")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"chunk_size": 5}, marks=[pytest.mark.feature("chunked prefill"), pytest.mark.slow]),
        pytest.param(
            {"num_blocks": 14, "chunk_size": 6}, marks=pytest.mark.feature("chunked prefill", "preemption")
        ),
    ],
    ids=str,
)
def test_trees_of_drafts_change_nothing(model, solo, options):
    """Latents and rotated keys of the accepted drafts are moved to their places."""
    coming = {tuple(prompt): seen.tokens for prompt, seen in zip(PROMPTS, solo)}
    engine = make(model, Bush(coming), **options)
    for output, want in zip(together(engine), solo):
        Seen.of(output).assert_close(want, BOUND)
    assert engine.core.stats.accepted_tokens > 15


@pytest.mark.feature("n-gram speculation", "greedy", "logprobs")
def test_n_gram_drafts_change_nothing(model):
    prompt = prompt_ids(7) * 3
    # Long enough that the model repeats two tokens.
    job = Job(ids(prompt), SamplingParams(temperature=0, **{**COMMON, "max_tokens": 24}))
    (want,) = run(make(model, **COLD), [job])
    engine = model.engine(tiny_settings(speculative=SPECULATIVE))
    (got,) = run(engine, [job])
    Seen.of(got).assert_close(Seen.of(want), BOUND)
    assert engine.core.stats.drafted_tokens > 0


@pytest.mark.slow
@pytest.mark.feature("quantized KV cache", "prefix cache", "logprobs")
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "fp8_e4m3", "int8"])
def test_a_quantized_cache_of_latents(model, solo, cache_dtype):
    """A hit reads exactly what was written, and log-probabilities are near those of float32."""
    scale = np.float32([0.05 if cache_dtype == "int8" else 1.0])
    scales = dict.fromkeys(range(2), (scale, scale))
    engine = model.engine(tiny_settings(), cache_dtype=cache_dtype, scales=scales)
    first, second = (run(engine, [Job(ids(PROMPTS[0]), PARAMS[0])])[0] for _ in range(2))
    assert second.num_cached_tokens > 0
    Seen.of(second).assert_close(Seen.of(first), 5e-3)
    token = solo[0].tokens[0]
    error = abs(Seen.of(first).logprobs[0].get(token, -np.inf) - solo[0].logprobs[0][token])
    assert error < 0.3
