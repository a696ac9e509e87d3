"""What the engine asks of a device: dispatch a step, and later give its results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jaxinfer.batch.builder import StepArrays
from jaxinfer.kv_cache.manager import SlotMove
from jaxinfer.scheduler.plan import ScheduledRow, StepPlan

Masks = Mapping[int, np.ndarray]
"""Index of a sampled row -> all tokens that it may get, a packed mask, uint32 [X]."""


@dataclass(frozen=True)
class LogprobRows:
    """Log-probabilities of P positions on the host; see ``LogprobOutputs`` for the fields."""

    chosen_P: np.ndarray
    rank_P: np.ndarray
    top_ids_PX: np.ndarray
    top_values_PX: np.ndarray
    named_values_PX: np.ndarray


@dataclass(frozen=True)
class ScoredChunk:
    """Log-probabilities of the prompt tokens that a row's positions predict.

    Attributes:
        first: position of the first predicted token.
        logprobs: one row per predicted token.
    """

    first: int
    logprobs: LogprobRows


@dataclass(frozen=True)
class ExpertLoad:
    """Rows of a step that each expert got, int32 [L, E], of these layers of the model. Padding does not count."""

    layers: tuple[int, ...]
    rows_LE: np.ndarray


@dataclass(frozen=True)
class StepResult:
    """Results of a step.

    Attributes:
        tokens: int32, one per sampled row.
        healthy: bool, False where the logits were not finite.
        logprobs: per sampled row, if any row asked for them.
        scores: scored chunks by index of the plan's row.
        pooled: float32 [D] by index of the plan's row, for rows of pooled requests: the sum of the hidden states after
            the final norm ("mean"), or the last one of the prompt ("last", absent before it is reached).
        experts: None if the model has no experts.
    """

    tokens: np.ndarray
    healthy: np.ndarray
    logprobs: LogprobRows | None
    scores: dict[int, ScoredChunk]
    pooled: dict[int, np.ndarray] = field(default_factory=dict)
    experts: ExpertLoad | None = None


class StepHandle(Protocol):
    """A dispatched step."""

    def result(self) -> StepResult:
        """Waits for the step and fetches what it computed."""
        ...


class BegunStep(Protocol):
    """A step whose layers are dispatched, and whose sampler waits for masks."""

    def sample(self, masks: Masks) -> StepHandle:
        """Dispatches the sampler; called once, before any other step."""
        ...


class Runner(Protocol):
    """Computes steps, in the order of dispatch."""

    def dispatch(self, plan: StepPlan, arrays: StepArrays) -> StepHandle:
        """Starts a step and returns at once. Newly sampled tokens stay on the device for the next step."""
        ...

    def begin(self, plan: StepPlan, arrays: StepArrays) -> BegunStep:
        """Starts all of a step but its sampler, and returns at once."""
        ...

    def move(self, moves: Sequence[SlotMove]) -> None:
        """Moves K and V between slots, before the next step. Those of a sequence are in the order of its positions, and
        no target lies behind its source."""
        ...


def pooled_positions(row: ScheduledRow) -> range:
    """Positions whose hidden states are summed for a pooled request; empty if none are wanted of this row."""
    stop = row.start + row.num_tokens
    match row.seq.request.pooling:
        case "mean":
            return range(row.start, stop)
        case "last" if stop == row.seq.num_prompt:
            return range(stop - 1, stop)
    return range(0)


def scored_range(row: ScheduledRow) -> tuple[int, int]:
    """Prompt positions (first, stop) whose log-probabilities this row yields; empty if none were asked for."""
    params = row.seq.request.params
    first = row.start + 1
    if params.prompt_logprobs is None or row.seq.index > 0:
        return first, first
    return first, min(row.start + row.num_tokens + 1, row.seq.num_prompt)
