"""Latency percentiles of the last seconds, as clients see them: measured when news are handed to the HTTP layer."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from math import log

import numpy as np

from jaxinfer.engine.deltas import OutputDelta
from serve.observers import Call

SMALLEST = 1e-4
GROWTH = 1.05
NUM_BUCKETS = 360
"""Buckets from 0.1 ms to about 4,000 s; each is 5 % wider than the one before, so percentiles are within 2.5 %."""
_SCALE = 1.0 / log(GROWTH)


class RollingHistogram:
    """Counts of values by logarithmic bucket, for the last ``seconds`` seconds. Adding is cheap enough for each token.

    Times are seconds on one clock that never falls.
    """

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds
        self._slots: deque[tuple[int, list[int]]] = deque()
        self._second = -1
        self._counts: list[int] = []

    def add(self, value: float, now: float) -> None:
        """Counts a value in seconds; values out of range go to the nearest bucket."""
        if int(now) != self._second:
            self._second = int(now)
            self._counts = [0] * NUM_BUCKETS
            self._slots.append((self._second, self._counts))
            self._forget(now)
        bucket = int(log(value / SMALLEST) * _SCALE) if value > SMALLEST else 0
        self._counts[bucket if bucket < NUM_BUCKETS else NUM_BUCKETS - 1] += 1

    def percentiles(self, now: float, *ranks: float) -> tuple[float | None, ...]:
        """Values in seconds for ranks from 0 to 1; None if nothing was counted lately."""
        self._forget(now)
        if not self._slots:
            return (None,) * len(ranks)
        cumulative = np.cumsum(np.sum([counts for _, counts in self._slots], axis=0))
        found = np.searchsorted(cumulative, np.maximum(np.asarray(ranks) * cumulative[-1], 0.5))
        return tuple(SMALLEST * GROWTH ** (float(bucket) + 0.5) for bucket in found)

    def _forget(self, now: float) -> None:
        while self._slots and self._slots[0][0] <= int(now) - self._seconds:
            self._slots.popleft()


class LatencyWindow:
    """TTFT, ITL and E2E of the last ``seconds`` seconds, over all choices of all calls.

    A delta of several tokens counts as one gap: that is what a client sees.
    """

    def __init__(self, seconds: int = 30, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.ttft = RollingHistogram(seconds)
        self.itl = RollingHistogram(seconds)
        self.e2e = RollingHistogram(seconds)

    def started(self, call: Call) -> "_CallLatency":
        return _CallLatency(self, call.received, self._clock)


class _CallLatency:
    """Latencies of one call."""

    def __init__(self, window: LatencyWindow, received: float, clock: Callable[[], float]) -> None:
        self._window = window
        self._received = received
        self._clock = clock
        self._newest: dict[tuple[str, int], float] = {}

    def news(self, deltas: Sequence[OutputDelta]) -> None:
        now = self._clock()
        for delta in deltas:
            choice = (delta.request_id, delta.index)
            if delta.token_ids:
                before = self._newest.get(choice)
                if before is None:
                    self._window.ttft.add(now - self._received, now)
                else:
                    self._window.itl.add(now - before, now)
                self._newest[choice] = now
            if delta.finish_reason is not None:
                self._window.e2e.add(now - self._received, now)

    def ended(self, error: str | None = None) -> None:
        """Choices that were left count with what was seen of them: their E2E has no meaning."""
