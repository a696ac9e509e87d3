"""A follower computes what the leader computes, from messages alone.

Both are in one process here, with a device each, so nothing but the messages connects them.
"""

import queue
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.hosts import wire
from jaxinfer.hosts.follower import follow
from jaxinfer.hosts.leader import LeaderRunner
from jaxinfer.hosts.steps import StepReader
from jaxinfer.sampling_params import SamplingParams
from tests.engine.test_invariance_tiny_lm import PARAMS, PROMPTS
from tests.support.engines import Job, ids, run
from tests.support.tiny_models import prompt_ids, tiny_model, tiny_settings
from tests.support.tokenizers import ByteTokenizer

JOBS = [Job(ids(prompt), params, at=at) for at, (prompt, params) in enumerate(zip(PROMPTS, PARAMS))]
GRAMMAR = {"json": {"enum": ["red", "green", [1, 2, 3]]}}


@dataclass
class Tape:
    """The link of a leader, and that of a follower which plays what the leader has said."""

    messages: list[bytes] = field(default_factory=list)
    ordered: list[np.ndarray] = field(default_factory=list)
    replayed: list[np.ndarray] = field(default_factory=list)

    def order(self, make: Any) -> None:
        self.messages.append(wire.encode(make("gang", len(self.messages))))

    def done(self, tokens: np.ndarray) -> None:
        self.ordered.append(tokens)

    def player(self) -> "Player":
        return Player(self)

    def wait_for_verdict(self) -> None: ...


@dataclass
class Player:
    tape: Tape
    at: int = 0
    pause: bool = True

    def next(self, timeout: float | None = None) -> wire.Work | None:
        self.pause = not self.pause
        if self.pause and timeout is not None:
            raise queue.Empty
        if self.at == len(self.tape.messages):
            return None
        self.at += 1
        return wire.decode_order(self.tape.messages[self.at - 1])

    def done(self, tokens: np.ndarray) -> None:
        self.tape.replayed.append(tokens)

    def wait_for_verdict(self) -> None: ...


def both(jobs: list[Job], tokenizer: ByteTokenizer | None = None, **options: Any) -> tuple[Tape, Any]:
    """Runs the jobs on a leader, and then all that it said on a follower; their tokens are equal in every step."""
    model, tape = tiny_model(), Tape()
    settings = tiny_settings(**options)
    follower = model.engine(settings, tokenizer=tokenizer)
    engine = model.engine(
        settings,
        tokenizer=tokenizer,
        wrap=lambda runner: LeaderRunner(tape, runner, follower.plan),  # type: ignore[arg-type]
    )
    for _ in range(2):
        run(engine, jobs)
    follow(tape.player(), follower.runner, follower.plan)  # type: ignore[arg-type]
    assert len(tape.ordered) == len(tape.replayed) > 10
    for ordered, replayed in zip(tape.ordered, tape.replayed):
        np.testing.assert_array_equal(ordered, replayed)
    return tape, engine


@pytest.mark.parametrize(
    "options",
    [{"chunk_size": 5}, {"num_blocks": 14, "prefix_caching": False, "overlap": 0}],
    ids=["chunks and prefix hits", "preemption"],
)
def test_schedules(options: dict[str, Any]) -> None:
    """With seeds, penalties, and prefix hits that copy a block."""
    _, engine = both(JOBS, **options)
    assert "num_blocks" not in options or engine.core.stats.preemptions > 0


def test_grammars_scores_and_bans() -> None:
    tokenizer = ByteTokenizer()
    params = [
        SamplingParams(seed=1, max_tokens=20, structured_outputs=GRAMMAR),
        SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=2, logit_bias={7: 3.0}, logprobs=1),
        SamplingParams(seed=2, max_tokens=9, min_tokens=4, bad_words=("a", "bc"), stop_token_ids=(9,)),
    ]
    jobs = [Job(ids(prompt_ids(9, at)), one, at=at) for at, one in enumerate(params)]
    tape, _ = both(jobs, tokenizer)
    kinds = {type(wire.decode_order(message)) for message in tape.messages}
    assert kinds == {wire.Step, wire.Masks}


@pytest.mark.slow
def test_drafts() -> None:
    ngram = SpeculativeConfig(drafter="ngram", max_drafts=5, max_step_drafts=12, ngram_shortest=1)
    _, engine = both(JOBS, speculative=ngram)
    assert engine.core.stats.drafted_tokens > 0


def test_other_shapes_are_an_error() -> None:
    tape, engine = both(JOBS[:1])
    step = wire.decode_order(tape.messages[0])
    assert isinstance(step, wire.Step)
    step.row_bucket += 1
    with pytest.raises(ValueError, match=r"step 0 of rank 0 has the shapes .* where this rank finds"):
        StepReader(engine.plan).read(step)
