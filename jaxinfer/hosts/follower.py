"""The life of a follower: it dispatches what the leader dispatches, in the same order."""

import queue
from collections import deque

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.hosts import wire
from jaxinfer.hosts.follower_link import FollowerLink
from jaxinfer.hosts.steps import StepReader, unpack_masks
from jaxinfer.kv_cache.manager import SlotMove
from jaxinfer.runner.protocol import BegunStep, Runner, StepHandle

_IDLE = 0.02
"""Seconds without work after which results are waited for."""
_DEPTH = 2
"""Steps on the devices before the oldest one is waited for: one more than an overlapped leader has."""


def follow(link: FollowerLink, runner: Runner, compiled: CompilePlan) -> None:
    """Works until the leader says that there is no more.

    Raises:
        Exception: a step has failed, though no rank is lost.
    """
    try:
        _Follower(link, runner, compiled).run()
    except Exception:
        link.wait_for_verdict()
        raise


class _Follower:
    def __init__(self, link: FollowerLink, runner: Runner, compiled: CompilePlan) -> None:
        self._link = link
        self._runner = runner
        self._reader = StepReader(compiled)
        self._begun: BegunStep | None = None
        self._in_flight: deque[StepHandle] = deque()

    def run(self) -> None:
        while True:
            try:
                work = self._link.next(_IDLE if self._in_flight else None)
            except queue.Empty:
                self._finish_oldest()
                continue
            if work is None:
                break
            self._do(work)
            while len(self._in_flight) > _DEPTH:
                self._finish_oldest()
        while self._in_flight:
            self._finish_oldest()

    def _do(self, work: wire.Work) -> None:
        match work:
            case wire.Step():
                plan, arrays = self._reader.read(work)
                if work.sample:
                    self._in_flight.append(self._runner.dispatch(plan, arrays))
                else:
                    self._begun = self._runner.begin(plan, arrays)
            case wire.Masks():
                assert self._begun is not None, "masks belong to a step that was begun"
                self._in_flight.append(self._begun.sample(unpack_masks(work.masks)))
                self._begun = None
            case wire.Moves():
                self._runner.move([SlotMove(*move) for move in work.moves])

    def _finish_oldest(self) -> None:
        self._link.done(self._in_flight.popleft().result().tokens)
