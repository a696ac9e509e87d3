"""Drafts where they pay: how many each sequence gets, so that the whole batch makes most tokens per second.

Draft k of a sequence yields a token with the probability that drafts 0 to k are all accepted, and costs what a step
with one token more takes longer. Both are known, so the best number of drafts is found by adding the likeliest ones
first, as long as the expected tokens per second grow. Drafts that fit in the padding of a step cost nothing.

A step with drafts is not overlapped with the one before it, so it takes the host's time on top. Where no draft makes up
for that, none are asked for, and steps are overlapped. A small share of the time is spent on probes, so that drafts
come back when they would pay again.
"""

from collections.abc import Sequence as Seq

import numpy as np

from jaxinfer.observability.snapshot import StepRecord
from jaxinfer.request import Sequence
from jaxinfer.speculative.acceptance import Acceptance
from jaxinfer.speculative.costs import StepCosts

PROBE_SHARE = 0.01
"""Part of the time that probes may cost."""

MAX_SAVED = 4
"""Probes that time may be saved for."""

GAIN = 1.02
"""Expected speed-up from which drafts are made; less is within the error of the estimates."""

UNLIKELY = 0.02
"""Drafts that are accepted more rarely are not even asked for."""


class AdaptiveDrafts:
    """Decides about drafts; ``Speculation`` asks it before each step and tells it how steps went.

    Args:
        overlapped: whether steps without drafts are overlapped.
        max_step_drafts: of all sequences in a step.
    """

    def __init__(self, costs: StepCosts, overlapped: bool, max_drafts: int, max_step_drafts: int) -> None:
        self._costs = costs
        self._overlapped = overlapped
        self._max_step_drafts = max_step_drafts
        self._acceptance = Acceptance(max_drafts)
        self._saved = 0.0
        """Seconds that probes may cost by now."""
        self._probing = False
        self._turn = 0
        self._tokens, self._rows = 0, 0
        """Of the next step without drafts."""

    def worth(self, sequences: Seq[Sequence], limits: Seq[int], tokens: int, rows: int) -> bool:
        """Whether drafts are to be asked for before the next step, which then waits for the one before it.

        Args:
            sequences, limits: those that can use drafts, and how many.
            tokens, rows: of the next step without drafts; its sampled rows.
        """
        self._tokens, self._rows = tokens, rows
        self._probing = False
        if not sequences:
            return False
        offered_RK, accepted_RK = self._acceptance.rates(sequences)
        fits_RK = np.arange(accepted_RK.shape[1]) < np.array(limits)[:, None]
        value, weight = accepted_RK.T[fits_RK.T], offered_RK.T[fits_RK.T]
        best = self._best(value, weight)
        plain = rows / self._plain_seconds()
        if best[1] > GAIN * plain:
            return True
        self._probing = self._saved >= self._probe_seconds() > 0
        return self._probing

    def limits(self, sequences: Seq[Sequence], limits: Seq[int]) -> list[int]:
        """How many drafts to ask for; at least 1."""
        likely_RK = self._acceptance.rates(sequences).accepted_RK >= UNLIKELY
        return [max(1, min(most, int(n))) for most, n in zip(limits, likely_RK.sum(1))]

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], offered: Seq[int]) -> list[int]:
        """How many of the offered drafts are verified, of each sequence.

        Args:
            limits: how many each was asked for.
        """
        for seq, limit, count in zip(sequences, limits, offered):
            self._acceptance.asked(seq, limit, count)
        if self._probing:
            return self._probe(offered)
        accepted_RK = self._acceptance.rates(sequences).accepted_RK
        # Of equal drafts the shallow ones come first, and it is each time another sequence's turn.
        self._turn += 1
        turn_R = np.roll(np.arange(len(offered)), self._turn)
        depth, at = np.nonzero(np.arange(accepted_RK.shape[1])[:, None] < np.array(offered)[turn_R])
        value = accepted_RK[turn_R[at], depth]
        count, _ = self._best(value, np.ones(len(value)))
        chosen = turn_R[at][_likeliest(value)[:count]]
        return np.bincount(chosen, minlength=len(offered)).tolist()

    def verified(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self._acceptance.verified(seq, drafted, accepted)

    def observe(self, record: StepRecord) -> None:
        """Takes note of a committed step."""
        self._costs.observe(record)
        enough = MAX_SAVED * max(self._probe_seconds(), 0.0) if self._rows else 0.0
        self._saved = min(self._saved + PROBE_SHARE * record.device_seconds, enough)

    def forget(self, seq: Sequence) -> None:
        self._acceptance.forget(seq)

    def _best(self, value_X: np.ndarray, weight_X: np.ndarray) -> tuple[int, float]:
        """How many drafts, the likeliest first, make most tokens per second; and how many those are.

        Args:
            value_X: probability that a draft yields a token, if it is offered; ``weight_X``: that it is offered.
        """
        order = _likeliest(value_X)[: self._max_step_drafts]
        drafts_X = np.concatenate([[0.0], np.cumsum(weight_X[order])])
        gained_X = np.concatenate([[0.0], np.cumsum((value_X * weight_X)[order])])
        seconds_X = self._costs.device_seconds(self._tokens + drafts_X, self._rows + drafts_X)
        rate_X = (self._rows + gained_X) / np.maximum(seconds_X + self._costs.host_seconds, 1e-9)
        count = int(rate_X.argmax())
        return count, float(rate_X[count])

    def _plain_seconds(self) -> float:
        """Of the next step without drafts and without waiting for them."""
        device, host = self._device_seconds(0), self._costs.host_seconds
        return max(device, host, 1e-9) if self._overlapped else max(device + host, 1e-9)

    def _device_seconds(self, drafts: int) -> float:
        tokens, rows = np.array(self._tokens + drafts), np.array(self._rows + drafts)
        return float(self._costs.device_seconds(tokens, rows))

    @property
    def _probe_drafts(self) -> int:
        """What fits in the next larger step."""
        return min(1 + self._costs.room(self._tokens + 1), self._max_step_drafts)

    def _probe_seconds(self) -> float:
        with_drafts = self._device_seconds(self._probe_drafts) + self._costs.host_seconds
        return with_drafts - self._plain_seconds()

    def _probe(self, offered: Seq[int]) -> list[int]:
        """One draft of each sequence, as far as the probe reaches, then a second one, and so on."""
        self._saved -= self._probe_seconds()
        left, counts = self._probe_drafts, [0] * len(offered)
        for depth in range(max(offered, default=0)):
            for i, count in enumerate(offered):
                if depth < count and left > 0:
                    counts[i] += 1
                    left -= 1
        return counts


def _likeliest(value_X: np.ndarray) -> np.ndarray:
    """Indices, most valuable first; a sequence's drafts in their order, since none is worth more than those before.

    Differences below a percent are chance: they would give some sequences all drafts, and the batch would thin out.
    """
    return np.argsort(-np.round(value_X, 2), kind="stable")
