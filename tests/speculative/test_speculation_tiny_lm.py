"""Speculation on a real runner and model: the tokens and log-probabilities of a run without it."""

from collections.abc import Sequence
from typing import Any

import pytest

from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.engine.build import Engine
from jaxinfer.request import Sequence as Seq
from jaxinfer.speculative.drafter import DraftJob
from jaxinfer.speculative.speculation import Speculation
from tests.engine.test_invariance_tiny_lm import BOUND, PARAMS, PROMPTS, Seen, cold_runs
from tests.support.engines import Job, ids, run, token_params
from tests.support.tiny_models import TinyModel, prompt_ids, tiny_model, tiny_settings

MARKS = {"ngram": "n-gram speculation", "suffix": "suffix speculation"}

SPECULATIVE = SpeculativeConfig(drafter="ngram", max_drafts=5, max_step_drafts=12, ngram_shortest=1)


class Oracle:
    """Knows what comes, but for every fourth token."""

    def __init__(self, outputs: dict[tuple[int, ...], Sequence[int]]) -> None:
        self._outputs = outputs

    def propose(self, jobs: Sequence[DraftJob]) -> list[tuple[int, ...]]:
        return [self._drafts(job) for job in jobs]

    def forget(self, seq: Seq) -> None:
        pass

    def _drafts(self, job: DraftJob) -> tuple[int, ...]:
        done = len(job.seq.output_token_ids)
        coming = self._outputs[job.seq.request.prompt_token_ids][done : done + job.limit]
        return tuple(token if (done + i) % 4 else token - 1 for i, token in enumerate(coming))


@pytest.fixture(
    scope="module",
    params=[pytest.param((None, None), marks=pytest.mark.slow), (8, None)],
    ids=["full", "window"],
)
def model(request: pytest.FixtureRequest) -> TinyModel:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def solo(model: TinyModel) -> list[Seen]:
    return cold_runs(model)


def fast(model: TinyModel, solo: list[Seen], **options: Any) -> Engine:
    engine = model.engine(tiny_settings(speculative=SPECULATIVE, **options))
    oracle = Oracle({tuple(prompt): seen.tokens for prompt, seen in zip(PROMPTS, solo)})
    engine.core.speculation = Speculation(oracle, *SPECULATIVE.draft_limits)
    return engine


@pytest.mark.feature("own drafter speculation")
@pytest.mark.parametrize(
    "options",
    [
        {"overlap": 0},
        {"overlap": 1},
        {"chunk_size": 5},
        {"num_blocks": 12, "prefix_caching": False},
        {"num_blocks": 12, "chunk_size": 6},
    ],
    ids=str,
)
def test_the_same_together_as_alone_without_speculation(model, solo, options):
    engine = fast(model, solo, **options)
    jobs = [Job(ids(prompt), params) for prompt, params in zip(PROMPTS, PARAMS)]
    outputs = run(engine, jobs)
    for output, want in zip(outputs, solo):
        Seen.of(output).assert_close(want, BOUND)
    stats = engine.core.stats
    assert stats.accepted_tokens > 0.4 * stats.drafted_tokens > 0
    if "num_blocks" in options:
        assert stats.preemptions > 0


OTHERS = {
    "ngram": SPECULATIVE,
    "suffix": SPECULATIVE.model_copy(update={"drafter": "suffix", "suffix_shortest": 1}),
}
of_every_drafter = pytest.mark.parametrize(
    "drafter", [pytest.param(name, marks=pytest.mark.feature(MARKS[name])) for name in OTHERS]
)


@pytest.mark.slow
@of_every_drafter
@pytest.mark.feature("greedy", "continuous batching")
def test_greedy_answers_to_200_prompts_are_those_without_speculation(drafter):
    """Prompts that repeat themselves and prompts that do not, a few at a time."""
    model = tiny_model()
    prompts = [(prompt_ids(3 + i % 7, i) * 4)[: 5 + i % 17] for i in range(200)]
    jobs = [Job(ids(prompt), token_params(max_tokens=12)) for prompt in prompts]
    engine = model.engine(tiny_settings(speculative=OTHERS[drafter]))
    plain = run(model.engine(tiny_settings()), jobs, check=False)
    for output, want in zip(run(engine, jobs, check=False), plain, strict=True):
        assert output.outputs[0].token_ids == want.outputs[0].token_ids
    assert engine.core.stats.accepted_tokens > 30


@pytest.mark.slow
@of_every_drafter
@pytest.mark.feature("prefix cache")
def test_prefix_hits_of_conversations_are_those_without_speculation(drafter):
    """Four conversations with one beginning, turn by turn, all at the same time: each turn finds what the turns before
    it computed, accepted drafts included, within 2 points of the hit rate."""
    model = tiny_model()
    rates, ends = [], []
    for speculative in (OTHERS[drafter], SpeculativeConfig()):
        engine = model.engine(tiny_settings(speculative=speculative))
        # The common beginning is cached before the conversations start. Which of them share it otherwise depends on
        # when its step is committed, which is later where steps are overlapped.
        run(engine, [Job(ids(prompt_ids(6) * 2), token_params(max_tokens=1))])
        talks = [prompt_ids(6) * 2 + prompt_ids(2, i) for i in range(4)]
        for turn in range(3):
            params = token_params(max_tokens=10, ignore_eos=True)
            outputs = run(engine, [Job(ids(talk), params) for talk in talks])
            for i, output in enumerate(outputs):
                talks[i] = [*talks[i], *output.outputs[0].token_ids, *prompt_ids(3, 7 * turn + i)]
        stats = engine.core.stats
        rates.append(stats.prefix_hit_tokens / stats.prefix_query_tokens)
        ends.append(talks)
    assert ends[0] == ends[1]
    assert rates[1] > 0.4
    assert abs(rates[0] - rates[1]) < 0.02


@pytest.mark.feature("prefix cache", "n-gram speculation")
def test_prefix_hits_of_one_conversation_are_those_without_speculation(model):
    """Each turn finds what the turns before it computed, accepted drafts included."""
    hits = []
    for speculative in (SPECULATIVE, SpeculativeConfig()):
        engine = model.engine(tiny_settings(speculative=speculative))
        prompt = prompt_ids(9) * 2
        for turn in range(3):
            (output,) = run(engine, [Job(ids(prompt), PARAMS[0])])
            prompt = [*prompt, *output.outputs[0].token_ids, *prompt_ids(3, turn)]
        hits.append((engine.core.stats.prefix_hit_tokens, prompt))
    assert hits[0] == hits[1]
    assert hits[0][0] > 0
