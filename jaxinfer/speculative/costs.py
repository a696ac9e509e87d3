"""How long steps take: measured at start-up, corrected by the steps that run."""

from collections import deque

import numpy as np

from jaxinfer.observability.snapshot import StepRecord
from jaxinfer.runner.timing import ProgramSeconds

RECENT = 15
"""Steps of a bucket that its time is estimated from."""


class StepCosts:
    """Device seconds of a step as a function of its tokens and sampled rows, and the host's share.

    A step costs what its buckets cost. A bucket that decoding steps ran in takes the low third of their newest times,
    which neither a slow step nor a compilation moves. The others take what was measured at start-up, times the ratio
    between the two where both are known: contexts, masks and other load make all buckets slower together.
    """

    def __init__(self, programs: ProgramSeconds) -> None:
        self._tokens_B = np.array(sorted(programs.layers))
        self._layers_B = np.array([programs.layers[t] for t in self._tokens_B.tolist()])
        self._rows_B = np.array(sorted(programs.sampling))
        self._sampling_B = np.array([programs.sampling[p] for p in self._rows_B.tolist()])
        self._seen_B: list[deque[float]] = [deque(maxlen=RECENT) for _ in self._tokens_B]
        self._host: deque[float] = deque(maxlen=RECENT)
        self._times_B = np.full(len(self._tokens_B), np.nan)
        """Of decoding steps that ran: as many sampled rows as tokens."""
        self._ratio = 1.0

    def observe(self, record: StepRecord) -> None:
        """Takes note of a committed step. Steps with parts of prompts tell about the host only."""
        self._host.append(record.host_seconds)
        if record.prefill_tokens or not record.decode_tokens:
            return
        bucket = int(self._bucket(self._tokens_B, record.decode_tokens))
        self._seen_B[bucket].append(record.device_seconds)
        self._times_B[bucket] = _low(self._seen_B[bucket])
        known = np.flatnonzero(~np.isnan(self._times_B))
        tokens = self._tokens_B[known]
        self._ratio = float(np.median(self._times_B[known] / self._at_start(tokens, tokens)))

    @property
    def host_seconds(self) -> float:
        """Of a step: what it takes longer if it is not overlapped."""
        return _low(self._host) if self._host else 0.0

    def device_seconds(self, tokens_X: np.ndarray, rows_X: np.ndarray) -> np.ndarray:
        """Of steps of so many tokens, of which so many rows are sampled; any shape."""
        expected_X = self._ratio * self._at_start(tokens_X, rows_X)
        seen_X = self._times_B[self._bucket(self._tokens_B, tokens_X)]
        return np.where((rows_X < tokens_X) | np.isnan(seen_X), expected_X, seen_X)

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


def _low(values: deque[float]) -> float:
    return sorted(values)[len(values) // 3]
