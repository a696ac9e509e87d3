"""Prompt log-probabilities, chunks, prefix hits and penalties on Tiny LM, against a dense float64 forward."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from jaxinfer.batch.builder import StepArrays
from jaxinfer.engine.build import Engine
from jaxinfer.outputs import RequestOutput
from jaxinfer.runner.jax_runner import JaxRunner
from jaxinfer.runner.protocol import StepHandle
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduler.plan import StepPlan
from tests.support.engines import Job, ids, run
from tests.support.tiny_models import FULL, MIXED, TinyModel, Windows, prompt_ids, tiny_model, tiny_settings

pytestmark = pytest.mark.kernels

BOUND = 5e-5
GREEDY = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=4)


class Recorded:
    """A runner that keeps the plans of all steps."""

    def __init__(self, inner: JaxRunner) -> None:
        self.steps: list[StepPlan] = []
        self._inner = inner

    def dispatch(self, plan: StepPlan, arrays: StepArrays) -> StepHandle:
        assert plan.num_tokens > 0, "a step without tokens"
        assert (arrays.samples.tokens < plan.num_tokens).all(), (
            "a row takes logits that the step does not have"
        )
        self.steps.append(plan)
        return self._inner.dispatch(plan, arrays)


def recorded(model: TinyModel, **options: Any) -> tuple[Engine, list[StepPlan]]:
    made: list[Recorded] = []

    def wrap(runner: JaxRunner) -> Recorded:
        made.append(Recorded(runner))
        return made[0]

    engine = model.engine(tiny_settings(**options), wrap=wrap)
    return engine, made[0].steps


@pytest.fixture(scope="module", params=[FULL, MIXED], ids=["full", "mixed"])
def model(request: pytest.FixtureRequest) -> TinyModel:
    windows: Windows = request.param
    return tiny_model(windows)


def check_prompt_logprobs(model: TinyModel, prompt: Sequence[int], output: RequestOutput) -> None:
    """One entry per prompt token, the first None, each the log-softmax of the dense forward."""
    entries = output.prompt_logprobs
    assert isinstance(entries, list)
    assert len(entries) == len(prompt)
    assert entries[0] is None
    logits_TV = model.logits(prompt)
    logprobs_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    for position in range(1, len(prompt)):
        entry, expected_V = entries[position], logprobs_TV[position - 1]
        assert entry is not None
        assert prompt[position] in entry
        assert len(entry) <= 2
        for token, value in entry.items():
            assert abs(value.logprob - expected_V[token]) <= BOUND
            # Tokens that tie within the bound may stand on either side.
            above = [(expected_V > expected_V[token] + bound).sum() for bound in (BOUND, -BOUND)]
            assert 1 + above[0] <= value.rank <= above[1], "with the other bound the token counts itself"


@pytest.mark.feature("prompt logprobs", "prefix cache")
@pytest.mark.parametrize("overlap", [0, 1])
def test_lpb_03_prompt_logprobs_in_every_order(model: TinyModel, overlap: int) -> None:
    """Block 4, chunk 4: prompts that share 8 ids and prompts of 4, 5, 8 and 9 ids, in several orders on one engine, at
    once and one by one, also behind a request that warmed the cache; requests that score their prompt do not
    read the cache, and a later one that does not still gets its hits."""
    shared = prompt_ids(8, 3)
    prompts = [
        shared + prompt_ids(2, 4),
        shared + prompt_ids(2, 5),
        *(prompt_ids(n, n) for n in (4, 5, 8, 9)),
    ]
    scoring = replace(GREEDY, prompt_logprobs=1, skip_reading_prefix_cache=None)
    engine, _ = recorded(model, chunk_size=4, overlap=overlap)
    run(engine, [Job(ids([*shared, 7]), GREEDY)])
    for order in [*list(permutations(range(3)))[:4], (0, 0), (3, 4, 5), (5, 0, 4)]:
        for batch in ([order], [(i,) for i in order]):
            for members in batch:
                for i, output in zip(members, run(engine, [Job(ids(prompts[i]), scoring) for i in members])):
                    assert output.num_cached_tokens == 0
                    check_prompt_logprobs(model, prompts[i], output)
    mixed = run(engine, [Job(ids(prompts[0]), scoring), Job(ids(prompts[1]), GREEDY)])
    check_prompt_logprobs(model, prompts[0], mixed[0])
    assert mixed[1].num_cached_tokens > 0


@pytest.mark.feature("prompt logprobs", "preemption")
@pytest.mark.parametrize("overlap", [0, 1])
def test_prompt_logprobs_survive_preemption(model: TinyModel, overlap: int) -> None:
    engine, _ = recorded(model, chunk_size=5, overlap=overlap, num_blocks=12)
    prompts = [prompt_ids(17, 1), prompt_ids(15, 2), prompt_ids(12, 8)]
    params = SamplingParams(
        temperature=0, ignore_eos=True, detokenize=False, max_tokens=14, prompt_logprobs=1, logprobs=0
    )
    outputs = run(engine, [Job(ids(p), params) for p in prompts])
    assert engine.core.stats.preemptions > 0
    for prompt, output in zip(prompts, outputs):
        check_prompt_logprobs(model, prompt, output)


@pytest.mark.feature("prompt logprobs", "chunked prefill", "overlap")
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("max_tokens", [1, 5])
def test_sch_06_only_the_last_chunk_samples(model: TinyModel, max_tokens: int, overlap: int) -> None:
    """Chunk 4; prompts of 3 to 17 ids alone, and three at once under a budget of 6 tokens a step, which cuts
    chunks unevenly."""
    lengths = (3, 4, 5, 7, 8, 9, 12, 15, 16, 17)
    prompts = {n: prompt_ids(n, 40 + n) for n in lengths}
    params = replace(GREEDY, max_tokens=max_tokens)
    options: dict[str, Any] = {"chunk_size": 4, "overlap": overlap, "prefix_caching": False}
    jobs: list[tuple[int, ...]] = [(n,) for n in lengths] + [lengths[i : i + 3] for i in range(8)]
    for members in jobs:
        budget: dict[str, Any] = {"max_num_batched_tokens": 6} if len(members) > 1 else {}
        engine, steps = recorded(model, **options, **budget)
        outputs = run(engine, [Job(ids(prompts[n]), params) for n in members])
        for n, output in zip(members, outputs):
            assert output.outputs[0].token_ids == model.greedy(prompts[n], max_tokens)
            rows = [row for step in steps for row in step.rows if len(row.seq.request.prompt_token_ids) == n]
            assert all(row.samples == (row.start + row.num_tokens >= n) for row in rows)
            # Under overlap nothing is planned behind max_tokens either.
            assert sum(row.samples for row in rows) == max_tokens


@pytest.mark.feature("chunked prefill", "prefix cache")
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("suffix", range(1, 10))
def test_sch_08_chunks_count_what_is_left_to_compute(model: TinyModel, suffix: int, overlap: int) -> None:
    """Chunk 8, block 4, 16 cached ids: one prefill step for a rest of up to 8 tokens, two for 9."""
    prompt = prompt_ids(16, 1) + prompt_ids(suffix, 70 + suffix)
    engine, steps = recorded(model, chunk_size=8, overlap=overlap)
    run(engine, [Job(ids(prompt[:16]), replace(GREEDY, max_tokens=1))])
    for max_tokens in (1, 3):
        steps.clear()
        output = run(engine, [Job(ids(prompt), replace(GREEDY, max_tokens=max_tokens))])[0]
        assert output.outputs[0].token_ids == model.greedy(prompt, max_tokens)
        if max_tokens == 1:
            assert output.num_cached_tokens == 16
            assert len(steps) == (1 if suffix <= 8 else 2)
    scored = run(
        engine, [Job(ids(prompt), replace(GREEDY, prompt_logprobs=1, skip_reading_prefix_cache=None))]
    )[0]
    check_prompt_logprobs(model, prompt, scored)


def test_sch_08_growing_chat(model: TinyModel) -> None:
    """Three turns, each with the whole history in front: all its full blocks are hits."""
    engine, _ = recorded(model, chunk_size=8)
    history: list[int] = []
    for turn in range(3):
        history += prompt_ids(9, 60 + turn)
        output = run(engine, [Job(ids(history), replace(GREEDY, max_tokens=6))])[0]
        assert output.outputs[0].token_ids == model.greedy(history, 6)
        # The turn before ended with a token that was sampled and never computed.
        computed = len(history) - 9 - 1
        assert output.num_cached_tokens == (0 if turn == 0 else computed // 4 * 4)
        history += output.outputs[0].token_ids


PENALTIES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9},
    {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 1.2},
)


def penalised_greedy(
    model: TinyModel, prompt: Sequence[int], count: int, penalties: dict[str, float]
) -> list[int]:
    """Repetition covers prompt and output, presence and frequency the output."""
    output: list[int] = []
    for _ in range(count):
        logits_V = model.logits([*prompt, *output])[-1].copy()
        seen = sorted({*prompt, *output})
        factor = penalties.get("repetition_penalty", 1.0)
        logits_V[seen] = np.where(logits_V[seen] > 0, logits_V[seen] / factor, logits_V[seen] * factor)
        counts_V = np.bincount(output, minlength=len(logits_V))
        logits_V -= penalties.get("presence_penalty", 0.0) * (counts_V > 0)
        logits_V -= penalties.get("frequency_penalty", 0.0) * counts_V
        output.append(int(logits_V.argmax()))
    return output


@pytest.mark.feature("penalties", "preemption", "overlap")
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("num_blocks", [64, 14])
def test_smp_07_penalties(model: TinyModel, num_blocks: int, overlap: int) -> None:
    """Two rounds on the same batch slots, with and without preemption: history is complete and nobody else's.

    Prompt and output come from a few tokens only, so that they repeat.
    """
    few = [3, 4, 5, 6, 7, 8]
    prompts = [[few[i % n] for i in range(length)] for n, length in ((2, 13), (3, 11), (5, 9), (6, 12))]
    engine, _ = recorded(model, num_blocks=num_blocks, overlap=overlap)
    plain: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False, "max_tokens": 12}
    for turn in range(2):
        rotated = PENALTIES[turn:] + PENALTIES[:turn]
        jobs = [Job(ids(p), SamplingParams(**plain, **how)) for p, how in zip(prompts, rotated)]
        for prompt, how, output in zip(prompts, rotated, run(engine, jobs)):
            assert output.outputs[0].token_ids == penalised_greedy(model, prompt, 12, how)
    assert (engine.core.stats.preemptions > 0) == (num_blocks < 64)
