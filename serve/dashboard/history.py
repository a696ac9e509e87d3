"""One sample a second of what the engine does, so that a page that is opened now shows the last minutes."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from jaxinfer.observability.snapshot import EngineSnapshot
from serve.dashboard.latency import LatencyWindow

KEPT_SAMPLES = 600
HIT_RATE_SAMPLES = 60
"""Hit rates are of the last minute: single seconds often have no admission."""


class Sample(NamedTuple):
    """The last second; rates per second, latencies in seconds (None: no such event), ratios from 0 to 1."""

    number: int
    time: float
    output_rate: float
    prompt_rate: float
    running: int
    waiting: int
    kv_usage: float
    hit_rate: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None
    e2e_p50: float | None
    e2e_p95: float | None


class _Mark(NamedTuple):
    """Counters at the time of a sample."""

    time: float
    generated: int
    prompt: int
    queried: int
    hit: int


class History:
    """Takes samples while ``run`` runs.

    Args:
        snapshot: what is sampled.
        clock: seconds, never falling; samples carry it.
    """

    def __init__(
        self,
        snapshot: Callable[[], EngineSnapshot],
        latency: LatencyWindow,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._snapshot = snapshot
        self._latency = latency
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._marks: deque[_Mark] = deque(maxlen=HIT_RATE_SAMPLES + 1)
        self._count = 0

    async def run(self, interval: float = 1.0) -> None:
        """Samples until it is cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(interval)

    def sample(self) -> None:
        now, snapshot = self._clock(), self._snapshot()
        mark = _Mark(
            now,
            snapshot.generated_tokens,
            snapshot.prompt_tokens,
            snapshot.prefix_query_tokens,
            snapshot.prefix_hit_tokens,
        )
        last = self._marks[-1] if self._marks else mark
        self._marks.append(mark)
        oldest = self._marks[0]
        seconds = max(mark.time - last.time, 1e-3)
        queried = mark.queried - oldest.queried
        self._samples.append(
            Sample(
                self._count,
                now,
                (mark.generated - last.generated) / seconds,
                (mark.prompt - last.prompt) / seconds,
                snapshot.running,
                snapshot.waiting,
                snapshot.used_blocks / max(snapshot.num_blocks, 1),
                (mark.hit - oldest.hit) / queried if queried else None,
                *self._latency.ttft.percentiles(now, 0.5, 0.95),
                *self._latency.itl.percentiles(now, 0.5, 0.95),
                *self._latency.e2e.percentiles(now, 0.5, 0.95),
            )
        )
        self._count += 1

    def since(self, number: int) -> list[Sample]:
        """Samples whose number is at least ``number``, oldest first."""
        newer = self._count - number
        if newer >= len(self._samples):
            return list(self._samples)
        return list(self._samples)[-newer:] if newer > 0 else []
