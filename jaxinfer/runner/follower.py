"""What computes beside the target model: it sees every step, in the order of dispatch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax

from jaxinfer.batch.builder import BatchBuilder, StepArrays
from jaxinfer.kv_cache.manager import SlotMove
from jaxinfer.scheduler.plan import StepPlan


@dataclass(frozen=True)
class TargetStep:
    """A step whose layers are dispatched.

    Attributes:
        newest_W: newest token of each batch slot before the step is sampled; resolves negative token ids.
        hidden_XD: its first T rows are the hidden states of the step's tokens before the final norm. The next step
            overwrites the buffer: nobody may keep it.
    """

    plan: StepPlan
    arrays: StepArrays
    newest_W: jax.Array
    hidden_XD: jax.Array


class Follower(Protocol):
    """Computes something of its own from each step of the target, such as the KV cache of a draft model."""

    def capture(self, layer: int, x_TD: jax.Array) -> None:
        """What goes into a layer at which a segment starts, in the step that ``follow`` is called with next. The
        segment overwrites it: what is wanted of it has to be dispatched at once."""
        ...

    def follow(self, step: TargetStep) -> None:
        """Dispatches its own work; block copies of the plan are to be made in its pools first."""
        ...

    def move(self, moves: Sequence[SlotMove]) -> None:
        """K and V of accepted drafts go to other slots; see ``Runner.move``."""
        ...

    def warm_ups(self, builder: BatchBuilder) -> list[Callable[[], object]]:
        """One call per program, on padding."""
        ...
