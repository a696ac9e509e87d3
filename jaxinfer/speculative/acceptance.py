"""How often drafts are offered and accepted, by depth: of each sequence, and of all of them."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from jaxinfer.request import Sequence

KEEP_OWN, KEEP_POOLED = 0.9, 0.98
"""What one verified draft leaves of the weight of those before it."""

TRUST = 2.0
"""Weight of the pooled rate in that of a sequence, and of a guess in the pooled one, in drafts."""

START = (0.5, 0.3, 0.5, 0.7, 0.85)
"""Rates of what nothing is known of, by class of evidence; the first one where there is none."""

START_OFFERED = (0.5, 1.0, 1.0, 1.0, 1.0)
"""The same of being offered: what a look-up has found, it offers."""


class Rates(NamedTuple):
    """Attributes:
    offered_RK: probability that a drafter gives more than k drafts.
    accepted_RK: probability that drafts 0 to k are all accepted, if they are offered. Falls with k.
    """

    offered_RK: np.ndarray
    accepted_RK: np.ndarray


class _Counts:
    """Decayed counts by class of evidence and depth, as arrays [rows, classes, K]."""

    def __init__(self, rows: int, depths: int) -> None:
        self.asked, self.offered, self.tried, self.passed = np.zeros((4, rows, len(START), depths))

    def ask(self, at: tuple[int, int], keep: float, limit: int, offered: int) -> None:
        self.asked[at][:limit] *= keep
        self.offered[at][:limit] *= keep
        self.asked[at][:limit] += 1
        self.offered[at][:offered] += 1

    def verify(self, at: tuple[int, int], keep: float, drafted: int, accepted: int) -> None:
        """Draft k is tried if those before it were accepted."""
        tried = min(drafted, accepted + 1)
        self.tried[at][:tried] *= keep
        self.passed[at][:tried] *= keep
        self.tried[at][:tried] += 1
        self.passed[at][:accepted] += 1

    def clear(self, row: int) -> None:
        for counts in (self.asked, self.offered, self.tried, self.passed):
            counts[row] = 0

    def grow(self) -> None:
        for name in ("asked", "offered", "tried", "passed"):
            counts = vars(self)[name]
            vars(self)[name] = np.concatenate([counts, np.zeros_like(counts)])


class Acceptance:
    """Learns rates from what drafters offer and what verification says.

    Classes are those of ``Evidence``, at the time of the drafts.

    Args:
        depths: K, most drafts of a sequence in a step.
    """

    def __init__(self, depths: int) -> None:
        self._own = _Counts(16, depths)
        self._pooled = _Counts(1, depths)
        self._row: dict[Sequence, int] = {}
        self._free = list(range(16))

    def __len__(self) -> int:
        """Sequences that are known."""
        return len(self._row)

    def asked(self, seq: Sequence, evidence: int, limit: int, offered: int) -> None:
        """A drafter was asked for up to ``limit`` drafts."""
        self._own.ask((self._row_of(seq), evidence), KEEP_OWN, limit, offered)
        self._pooled.ask((0, evidence), KEEP_POOLED, limit, offered)

    def verified(self, seq: Sequence, evidence: int, drafted: int, accepted: int) -> None:
        self._own.verify((self._row_of(seq), evidence), KEEP_OWN, drafted, accepted)
        self._pooled.verify((0, evidence), KEEP_POOLED, drafted, accepted)

    def forget(self, seq: Sequence) -> None:
        row = self._row.pop(seq, None)
        if row is not None:
            self._own.clear(row)
            self._free.append(row)

    def rates(self, sequences: Seq[Sequence], evidence: Seq[int]) -> Rates:
        """Of R sequences, known or not, with their classes: what they did, mixed with what all did."""
        rows, classes = [self._row_of(seq) for seq in sequences], list(evidence)
        offered_CK = np.zeros_like(self._pooled.asked[0])
        accepted_CK = np.zeros_like(offered_CK)
        for e in set(classes):
            offered_CK[e] = _pooled_rate(
                self._pooled.offered[0, e], self._pooled.asked[0, e], START_OFFERED[e]
            )
            accepted_CK[e] = _pooled_rate(self._pooled.passed[0, e], self._pooled.tried[0, e], START[e])
        own, at = self._own, (rows, classes)
        offered_RK = (own.offered[at] + TRUST * offered_CK[classes]) / (own.asked[at] + TRUST)
        accepted_RK = (own.passed[at] + TRUST * accepted_CK[classes]) / (own.tried[at] + TRUST)
        return Rates(np.minimum.accumulate(offered_RK, axis=1), np.cumprod(accepted_RK, axis=1))

    def _row_of(self, seq: Sequence) -> int:
        row = self._row.get(seq)
        if row is None:
            if not self._free:
                rows = len(self._own.asked)
                self._own.grow()
                self._free = list(range(rows, 2 * rows))
            row = self._row[seq] = self._free.pop()
        return row


def _pooled_rate(passed_K: np.ndarray, tried_K: np.ndarray, start: float) -> np.ndarray:
    """Rates by depth; where little is known, that of the depth before."""
    rate, rates = start, []
    for passed, tried in zip(passed_K.tolist(), tried_K.tolist()):
        rate = (passed + TRUST * rate) / (tried + TRUST)
        rates.append(rate)
    return np.array(rates)
