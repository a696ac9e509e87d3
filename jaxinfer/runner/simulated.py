"""A runner without a device: a cost model, and tokens that are a function of request and position."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.batch.builder import StepArrays
from jaxinfer.kv_cache.manager import SlotMove
from jaxinfer.runner.pooled_stand_in import pooled_stand_in
from jaxinfer.runner.protocol import Masks, StepResult
from jaxinfer.sampling.masks import unpack
from jaxinfer.scheduler.plan import StepPlan


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step: ``base + per_token * tokens + per_context * context tokens read``."""

    base: float = 0.0
    per_token: float = 0.0
    per_context: float = 0.0

    def seconds(self, plan: StepPlan) -> float:
        context = sum(row.start + row.num_tokens for row in plan.rows) if self.per_context else 0
        return self.base + self.per_token * plan.num_tokens + self.per_context * context


@dataclass(frozen=True)
class _SimulatedHandle:
    tokens: np.ndarray
    ready_time: float
    pooled: dict[int, np.ndarray]

    def result(self) -> StepResult:
        wait = self.ready_time - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        return StepResult(self.tokens, np.ones(len(self.tokens), bool), None, {}, self.pooled)


@dataclass(frozen=True)
class SimulatedStep:
    tokens: np.ndarray
    ready_time: float
    pooled: dict[int, np.ndarray]

    def sample(self, masks: Masks) -> _SimulatedHandle:
        """A row with a mask gets one of the tokens that it allows."""
        for index, mask_X in masks.items():
            allowed = np.flatnonzero(unpack(mask_X, 32 * len(mask_X)))
            self.tokens[index] = allowed[self.tokens[index] % len(allowed)]
        return _SimulatedHandle(self.tokens, self.ready_time, self.pooled)


class SimulatedRunner:
    """Steps take the time that a cost model says; a device runs one step after the other.

    Tokens depend on the sequence's random stream and position only, and never are ids below ``first_token``, so a
    test can keep EOS out of the way.
    """

    def __init__(self, vocab_size: int, cost: CostModel, first_token: int = 3) -> None:
        self._span = vocab_size - first_token
        self._first = first_token
        self._cost = cost
        self._free_at = 0.0

    def dispatch(self, plan: StepPlan, arrays: StepArrays) -> _SimulatedHandle:
        return self.begin(plan, arrays).sample({})

    def begin(self, plan: StepPlan, arrays: StepArrays) -> SimulatedStep:
        rows = arrays.samples.rows
        keys = np.array([row.seq.key[0] for row in rows], np.int64)
        positions = arrays.samples.positions.astype(np.int64)
        tokens = self._first + (keys * 2654435761 + positions * 40503) % self._span
        self._free_at = max(self._free_at, time.perf_counter()) + self._cost.seconds(plan)
        return SimulatedStep(tokens.astype(np.int32), self._free_at, pooled_stand_in(plan))

    def move(self, moves: Sequence[SlotMove]) -> None:
        """There are no K and V."""
