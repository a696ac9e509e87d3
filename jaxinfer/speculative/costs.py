"""How long steps take: measured at start-up, corrected by the steps that run."""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection

import numpy as np

from jaxinfer.observability.snapshot import StepRecord
from jaxinfer.runner.timing import ProgramSeconds

RECENT = 15
"""Steps of a kind that its time is estimated from."""


class StepCosts:
    """Seconds of steps as a function of their tokens and sampled rows, with drafts and without.

    On the device, a step costs what its buckets cost. A bucket that decoding steps ran in takes the low third of their
    newest times, which neither a slow step nor a compilation moves. The others take what was measured at start-up,
    times the ratio between the two where both are known: contexts, masks and other load make all buckets slower
    together.

    By the clock, a step without drafts costs what passed between the results of such steps, one behind the other: that
    knows how much of the host's time is hidden. A step with drafts costs its device time, the making of drafts, and
    what lay between in earlier ones, since it is not overlapped.

    Args:
        overlapped: whether steps without drafts are overlapped.
        max_drafts: most drafts of a sequence.
    """

    def __init__(self, programs: ProgramSeconds, overlapped: bool, max_drafts: int) -> None:
        self._overlapped = overlapped
        self._tokens = sorted(programs.layers)
        self._tokens_B = np.array(self._tokens)
        self._layers_B = np.array([programs.layers[t] for t in self._tokens_B.tolist()])
        self._rows_B = np.array(sorted(programs.sampling))
        self._sampling_B = np.array([programs.sampling[p] for p in self._rows_B.tolist()])
        self._seen_B = _deques(len(self._tokens_B))
        self._news: set[int] = set()
        """Buckets that ran since it was last asked for times."""
        self._times_B = np.full(len(self._tokens_B), np.nan)
        """Device seconds of decoding steps that ran: as many sampled rows as tokens."""
        self._ratio = 1.0
        self._plain_B = _deques(len(self._tokens_B))
        self._host: deque[float] = deque(maxlen=RECENT)
        self._around: deque[float] = deque(maxlen=RECENT)
        """What steps with drafts took beside the device and the making of drafts."""
        self._drafting = _deques(max_drafts + 1)
        """Seconds of the making of drafts, by the deepest of them."""
        self._just_drafted = 0.0
        self._steady = False
        """The step before was one without drafts, and of tokens to decode only."""

    def drafted(self, depth: int, seconds: float) -> None:
        """Drafts were made for the next step, the deepest of so many tokens."""
        self._drafting[min(depth, len(self._drafting) - 1)].append(seconds)
        self._just_drafted = seconds

    def observe(self, record: StepRecord, waited: bool = False) -> None:
        """Takes note of a committed step. Steps with parts of prompts tell about the host only.

        Args:
            waited: it was not overlapped with the one before it, for the sake of drafts.
        """
        self._host.append(record.host_seconds)
        decodes = not record.prefill_tokens and record.decode_tokens > 0
        if decodes:
            bucket = bisect_left(self._tokens, record.decode_tokens, hi=len(self._tokens) - 1)
            self._seen_B[bucket].append(record.device_seconds)
            self._news.add(bucket)
            if waited:
                self._around.append(record.interval - record.device_seconds - self._just_drafted)
            elif self._steady:
                self._plain_B[bucket].append(record.interval)
        self._steady = decodes and not waited

    @property
    def host_seconds(self) -> float:
        """Of a step: what it takes longer if it is not overlapped."""
        return _low(self._host) if self._host else 0.0

    def plain_seconds(self, tokens: int, rows: int) -> float:
        """By the clock, of a step without drafts among others of the kind."""
        seen = self._plain_B[bisect_left(self._tokens, tokens, hi=len(self._tokens) - 1)]
        if seen:
            return max(_low(seen), 1e-9)
        device = float(self.device_seconds(np.array(tokens), np.array(rows)))
        both = max(device, self.host_seconds) if self._overlapped else device + self.host_seconds
        return max(both, 1e-9)

    def verifying_seconds(self, tokens_X: np.ndarray, rows_X: np.ndarray) -> np.ndarray:
        """By the clock, of steps with drafts that are made already."""
        # The host's time is one more guess: a single slow step says little.
        around = _low([*self._around, self.host_seconds])
        return np.maximum(self.device_seconds(tokens_X, rows_X) + around, 1e-9)

    def drafting_seconds(self) -> np.ndarray:
        """Of the making of drafts by the deepest of them, [K + 1]; what is not known is in proportion to the nearest
        depth below, or as the one above."""
        seconds_K = np.zeros(len(self._drafting))
        below = next((depth for depth, seen in enumerate(self._drafting) if seen), None)
        if below is None:
            return seconds_K
        seconds_K[:below] = _low(self._drafting[below])
        for depth in range(below, len(seconds_K)):
            if self._drafting[depth]:
                below = depth
            seconds_K[depth] = _low(self._drafting[below]) * depth / max(below, 1)
        return np.maximum.accumulate(seconds_K)

    def device_seconds(self, tokens_X: np.ndarray, rows_X: np.ndarray) -> np.ndarray:
        """Of steps of so many tokens, of which so many rows are sampled; any shape."""
        self._learn()
        expected_X = self._ratio * self._at_start(tokens_X, rows_X)
        seen_X = self._times_B[self._bucket(self._tokens_B, tokens_X)]
        return np.where((rows_X < tokens_X) | np.isnan(seen_X), expected_X, seen_X)

    def _learn(self) -> None:
        """Takes what ``observe`` was told into account; steps that nobody asks about cost next to nothing."""
        if not self._news:
            return
        for bucket in self._news:
            self._times_B[bucket] = _low(self._seen_B[bucket])
        self._news.clear()
        known = np.flatnonzero(~np.isnan(self._times_B))
        tokens = self._tokens_B[known]
        self._ratio = float(np.median(self._times_B[known] / self._at_start(tokens, tokens)))

    def room(self, tokens: int) -> int:
        """Tokens that a step of so many may hold for the same price."""
        return int(self._tokens_B[self._bucket(self._tokens_B, tokens)]) - tokens

    def _at_start(self, tokens_X: np.ndarray, rows_X: np.ndarray) -> np.ndarray:
        layers_X = self._layers_B[self._bucket(self._tokens_B, tokens_X)]
        return layers_X + self._sampling_B[self._bucket(self._rows_B, rows_X)]

    @staticmethod
    def _bucket(sizes_B: np.ndarray, count_X: np.ndarray | int) -> np.ndarray:
        """Index of the smallest size that holds the count; the last one for more than that."""
        return np.minimum(np.searchsorted(sizes_B, np.ceil(count_X)), len(sizes_B) - 1)


def _deques(count: int) -> list[deque[float]]:
    return [deque(maxlen=RECENT) for _ in range(count)]


def _low(values: Collection[float]) -> float:
    return sorted(values)[len(values) // 3]
