"""Speculation on a real runner and model: the tokens and log-probabilities of a run without it."""

from collections.abc import Sequence
from typing import Any

import pytest

from jaxinfer.config import SpeculativeConfig
from jaxinfer.engine.build import Engine
from jaxinfer.request import Sequence as Seq
from jaxinfer.speculative.drafter import DraftJob
from jaxinfer.speculative.speculation import Speculation
from tests.engine.test_invariance_tiny_lm import BOUND, PARAMS, PROMPTS, Seen
from tests.support.engines import Job, ids, run
from tests.support.tiny_models import TinyModel, prompt_ids, tiny_model, tiny_settings

pytestmark = pytest.mark.feature("n-gram speculation")

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


@pytest.fixture(scope="module", params=[(None, None), (8, None)], ids=["full", "window"])
def model(request: pytest.FixtureRequest) -> TinyModel:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def solo(model: TinyModel) -> list[Seen]:
    cold = tiny_settings(prefix_caching=False, overlap=0)
    return [
        Seen.of(run(model.engine(cold), [Job(ids(prompt), params)])[0])
        for prompt, params in zip(PROMPTS, PARAMS)
    ]


def fast(model: TinyModel, solo: list[Seen], **options: Any) -> Engine:
    engine = model.engine(tiny_settings(speculative=SPECULATIVE, **options))
    oracle = Oracle({tuple(prompt): seen.tokens for prompt, seen in zip(PROMPTS, solo)})
    engine.core._speculation = Speculation(oracle, *SPECULATIVE.draft_limits)
    return engine


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


@pytest.mark.feature("prefix cache")
def test_prefix_hits_of_a_conversation_are_those_without_speculation(model):
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
