"""The leader's runner: every dispatch goes to the followers before it goes to the devices."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from jaxinfer.batch.builder import StepArrays
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.hosts import wire
from jaxinfer.hosts.leader_link import LeaderLink
from jaxinfer.hosts.steps import pack_masks, pack_step
from jaxinfer.kv_cache.manager import SlotMove
from jaxinfer.runner.protocol import BegunStep, Masks, Runner, StepHandle, StepResult
from jaxinfer.scheduler.plan import StepPlan


@dataclass(frozen=True)
class _Handle:
    link: LeaderLink
    inner: StepHandle

    def result(self) -> StepResult:
        with lost_ranks_explain_errors(self.link):
            result = self.inner.result()
        self.link.done(result.tokens)
        return result


@dataclass(frozen=True)
class _BegunStep:
    link: LeaderLink
    inner: BegunStep

    def sample(self, masks: Masks) -> _Handle:
        packed = pack_masks(masks)
        self.link.order(lambda gang, number: wire.Masks(gang, number, packed))
        with lost_ranks_explain_errors(self.link):
            return _Handle(self.link, self.inner.sample(masks))


@dataclass(frozen=True)
class LeaderRunner:
    """A ``Runner`` of rank 0.

    Attributes:
        inner: of this process' devices.
        plan: all shapes.
    """

    link: LeaderLink
    inner: Runner
    plan: CompilePlan

    def dispatch(self, plan: StepPlan, arrays: StepArrays) -> _Handle:
        self._order(plan, arrays, sample=True)
        with lost_ranks_explain_errors(self.link):
            return _Handle(self.link, self.inner.dispatch(plan, arrays))

    def begin(self, plan: StepPlan, arrays: StepArrays) -> _BegunStep:
        self._order(plan, arrays, sample=False)
        with lost_ranks_explain_errors(self.link):
            return _BegunStep(self.link, self.inner.begin(plan, arrays))

    def move(self, moves: Sequence[SlotMove]) -> None:
        packed = [(move.group, move.source, move.target) for move in moves]
        self.link.order(lambda gang, number: wire.Moves(gang, number, packed))
        with lost_ranks_explain_errors(self.link):
            self.inner.move(moves)

    def _order(self, plan: StepPlan, arrays: StepArrays, sample: bool) -> None:
        self.link.order(lambda gang, number: pack_step(gang, number, plan, arrays, self.plan, sample))


@contextmanager
def lost_ranks_explain_errors(link: LeaderLink) -> Iterator[None]:
    """A sum over devices fails where one of them is gone. Then the process ends with the name of the rank, not with
    what the network said."""
    try:
        yield
    except Exception:
        link.wait_for_verdict()
        raise
