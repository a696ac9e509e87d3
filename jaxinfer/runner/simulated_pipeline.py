"""A pipeline without devices: stages that sleep, and the tokens of ``SimulatedRunner``."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from jaxinfer.batch.builder import StepArrays
from jaxinfer.kv_cache.manager import SlotMove
from jaxinfer.runner.protocol import Masks, StepHandle, StepResult
from jaxinfer.runner.simulated import CostModel, SimulatedRunner, SimulatedStep
from jaxinfer.scheduler.plan import StepPlan
from sharding.stages import Observer, StageLine


@dataclass(frozen=True)
class _Handle:
    done: "Future[StepHandle]"

    def result(self) -> StepResult:
        return self.done.result().result()


@dataclass(frozen=True)
class _BegunStep:
    step: SimulatedStep
    line: StageLine

    def sample(self, masks: Masks) -> _Handle:
        return _Handle(self.line.submit(self.step.sample(masks)))


def _sleep(seconds: float, handle: StepHandle) -> StepHandle:
    time.sleep(seconds)
    return handle


class SimulatedPipeline:
    """A runner whose stages sleep, each on a thread of its own as in ``PipelineRunner``.

    Args:
        seconds: that each stage sleeps per step.
        observe: told when a stage was busy.
    """

    def __init__(self, vocab_size: int, seconds: Sequence[float], observe: Observer | None = None) -> None:
        self._tokens = SimulatedRunner(vocab_size, CostModel())

        self._line = StageLine([partial(_sleep, duration) for duration in seconds], observe)

    def dispatch(self, plan: StepPlan, arrays: StepArrays) -> _Handle:
        return self.begin(plan, arrays).sample({})

    def begin(self, plan: StepPlan, arrays: StepArrays) -> _BegunStep:
        return _BegunStep(self._tokens.begin(plan, arrays), self._line)

    def move(self, moves: Sequence[SlotMove]) -> None:
        """There are no K and V."""
