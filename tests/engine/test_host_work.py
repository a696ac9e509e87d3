"""The host's work in a step: linear in the number of sequences, counted in calls instead of seconds."""

import gc
import sys
from types import FrameType
from typing import Any

import pytest

from benchmarks.host_overhead import TimedRunner, fill, make_engine
from jaxinfer.engine.build import Engine
from jaxinfer.runner.simulated import CostModel, SimulatedRunner

STEPS = 16
"""So that every sequence crosses one block border."""

MOST_CALLS = 40
"""Of a sequence in a step of a plain decode, amortized work at block borders included."""


def decoding(num_seqs: int) -> Engine:
    engine = make_engine(num_seqs, TimedRunner(SimulatedRunner(32000, CostModel())))
    fill(engine, num_seqs)
    return engine


def calls_per_step(num_seqs: int) -> float:
    """Calls of Python functions and of built-in ones."""
    engine = decoding(num_seqs)
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        for _ in range(STEPS):
            engine.core.step()
    finally:
        sys.setprofile(None)
    return count / STEPS


def test_calls_grow_linearly_with_the_sequences() -> None:
    few, some, many = (calls_per_step(n) for n in (8, 64, 512))
    first, second = (some - few) / (64 - 8), (many - some) / (512 - 64)
    assert second == pytest.approx(first, rel=0.05), "calls of a sequence depend on how many there are"
    assert second <= MOST_CALLS, "a decode got more expensive: see docs/performance.md, host time"


def test_what_is_made_for_every_token_is_not_the_garbage_collectors_business() -> None:
    engine = decoding(4)
    plan = engine.core.scheduler.schedule()
    assert plan is not None
    assert not any(gc.is_tracked(row) for row in plan.rows)
    assert not any(gc.is_tracked(delta) for delta in engine.core.step())
