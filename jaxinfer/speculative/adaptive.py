"""Drafts where they pay: how many each sequence gets, so that the whole batch makes most tokens per second.

Draft k of a sequence yields a token with the probability that drafts 0 to k are all accepted, and costs what a step
with one token more takes longer. Both are estimated, so the best number of drafts is found by adding the likeliest ones
first, as long as the expected tokens per second grow. Drafts that fit in the padding of a step cost nothing.

A step with drafts is not overlapped with the one before it, and drafts take time to be made. Where no draft makes up
for that, none are asked for, and steps are overlapped; the question is asked again a few steps later. A small share of
the time is spent on probes, so that drafts come back when they would pay again.

Estimates may promise too much: the sequences that look best are those whose luck was best. So accounts are kept, in
units of a step without drafts. Each step with drafts is charged what it took longer than its tokens would have taken
without them, and credited what it took less. With nothing left on the account there are only probes. What drafts can
cost, however wrong the estimates are, is what the accounts start with and get with each step.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from jaxinfer.observability.snapshot import StepRecord
from jaxinfer.request import Sequence
from jaxinfer.speculative.acceptance import Acceptance, Rates
from jaxinfer.speculative.costs import StepCosts
from jaxinfer.speculative.evidence import NOTHING

SHARE = 0.005
"""What each of both accounts gets with each step."""

START_CREDIT, MAX_CREDIT = 1.0, 10.0
"""Steps that drafts may cost before they were any good, and most of what is kept of their gains."""

START_SAVED, MAX_SAVED = 0.5, 2.0
"""Steps that probes may be expected to lose at once, and most that is kept for them."""

MAX_CHARGE = 2.0
"""Most steps that one with drafts is charged: what took longer was held up by something else."""

RESUME = 0.3
"""Credit from which drafts come back after it was used up."""


ENTER, STAY = 1.05, 1.02
"""Expected speed-up from which drafts begin, and below which they end; less is within the error of the estimates."""

PAUSE, MAX_PAUSE = 8, 24
"""Steps until the question is asked again where the answer was no, half a step per sequence and at most the first
number; and between two probes, of which each one that gains nothing doubles the distance to the next one."""

UNLIKELY = 0.02
"""Drafts that are accepted more rarely are not even asked for."""


@dataclass(frozen=True)
class Candidate:
    """A sequence that can use drafts.

    Attributes:
        limit: how many.
        evidence: class of what its known tokens promise, see ``Evidence``.
    """

    seq: Sequence
    limit: int
    evidence: int


class AdaptiveDrafts:
    """Decides about drafts; ``Speculation`` asks it before each step and tells it how steps went.

    Args:
        max_step_drafts: of all sequences in a step.
    """

    def __init__(self, costs: StepCosts, max_drafts: int, max_step_drafts: int) -> None:
        self._costs = costs
        self._max_step_drafts = max_step_drafts
        self._acceptance = Acceptance(max_drafts)
        self._evidence: dict[Sequence, int] = {}
        """Of the drafts that each sequence was offered last."""
        self._credit, self._saved = START_CREDIT, START_SAVED
        self._broke = False
        """The credit was used up and has not come back."""
        self._drafting = self._probing = False
        self._pause = self._deepest = 0
        self._distance, self._until_probe = PAUSE, 0
        """Steps between two probes, and until the next one."""
        self._turn = 0
        self._tokens, self._rows = 0, 0
        """Of the next step without drafts."""
        self._asked = self._asked_as_probe = False
        """The next step that is committed waited for drafts."""
        self._follows = False
        """The step before did: so this one is not overlapped with it either."""
        self._accepted = 0
        """Drafts of the step that were right."""

    def rests(self) -> bool:
        """Whether it is not even worth asking; to be called once before each step."""
        self._pause -= 1
        self._until_probe -= 1
        return self._pause >= 0

    def worth(self, candidates: Seq[Candidate], tokens: int, rows: int) -> bool:
        """Whether drafts are to be asked for before the next step, which then waits for the one before it.

        Args:
            candidates: those that may get drafts.
            tokens, rows: of the next step without drafts; its sampled rows.
        """
        self._tokens, self._rows = tokens, rows
        self._probing = False
        if not candidates:
            return False
        plain = self._costs.plain_seconds(tokens, rows)
        value, weight, depth = self._promised(candidates)
        count, best = self._best(value, weight, depth)
        if not self._broke and best * plain > (STAY if self._drafting else ENTER) * rows:
            self._deepest = self._worth_asking(depth[_likeliest(value)[:count]], plain)
            self._drafting = True
            return True
        self._drafting = False
        self._probing = self._until_probe <= 0 and self._may_probe(value * weight, plain)
        if not self._probing:
            self._pause = min(PAUSE, len(candidates) // 2)
        return self._probing

    def _promised(self, candidates: Seq[Candidate]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of every draft that the candidates may get, by depth: the probability that it yields a token if it is
        offered, the probability that it is, and the tokens before it."""
        offered_RK, accepted_RK = self._rates(candidates)
        # What was looked up says nothing any more if the token in flight is another one.
        guessed_R = np.array([c.evidence > NOTHING and c.seq.num_in_flight > 0 for c in candidates])
        offered_RK = offered_RK * np.where(guessed_R[:, None], accepted_RK[:, :1], 1.0)
        fits_RK = np.arange(accepted_RK.shape[1]) < np.array([c.limit for c in candidates])[:, None]
        return accepted_RK.T[fits_RK.T], offered_RK.T[fits_RK.T], np.nonzero(fits_RK.T)[0]

    def _rates(self, candidates: Seq[Candidate]) -> Rates:
        return self._acceptance.rates([c.seq for c in candidates], [c.evidence for c in candidates])

    def limits(self, candidates: Seq[Candidate]) -> list[int]:
        """How many drafts to ask for; at least 1."""
        likely_RK = self._rates(candidates).accepted_RK >= UNLIKELY
        deepest = -(-self._probe_drafts // len(candidates)) if self._probing else self._deepest
        return [max(1, min(c.limit, int(n), deepest)) for c, n in zip(candidates, likely_RK.sum(1))]

    def choose(self, candidates: Seq[Candidate], offered: Seq[int]) -> list[int]:
        """How many of the offered drafts are verified, of each sequence.

        Args:
            candidates: with as many drafts as each was asked for.
        """
        self._asked, self._asked_as_probe, self._accepted = True, self._probing, 0
        for c, count in zip(candidates, offered):
            self._acceptance.asked(c.seq, c.evidence, c.limit, count)
            self._evidence[c.seq] = c.evidence
        if self._probing:
            self._until_probe = self._distance
            return self._probe(offered)
        accepted_RK = self._rates(candidates).accepted_RK
        # Of equal drafts the shallow ones come first, and it is each time another sequence's turn.
        self._turn += 1
        turn_R = np.roll(np.arange(len(offered)), self._turn)
        depth, at = np.nonzero(np.arange(accepted_RK.shape[1])[:, None] < np.array(offered)[turn_R])
        value = accepted_RK[turn_R[at], depth]
        count, _ = self._best(value, np.ones(len(value)), None)
        chosen = turn_R[at][_likeliest(value)[:count]]
        return np.bincount(chosen, minlength=len(offered)).tolist()

    def drafted(self, depth: int, seconds: float) -> None:
        """The drafts of the next step took so long to be made; the deepest has so many tokens."""
        self._costs.drafted(depth, seconds)

    def verified(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self._acceptance.verified(seq, self._evidence.get(seq, NOTHING), drafted, accepted)
        self._accepted += accepted

    def observe(self, record: StepRecord) -> None:
        """Takes note of a committed step."""
        rows = record.decode_tokens - record.drafts
        if (self._asked or self._follows) and rows and not record.prefill_tokens:
            plain = self._costs.plain_seconds(rows, rows)
            self._charge((self._accepted if self._asked else 0) / rows + 1 - record.interval / plain)
        self._costs.observe(record, self._asked)
        self._asked, self._follows = False, self._asked
        self._credit = min(self._credit + SHARE, MAX_CREDIT)
        self._saved = min(self._saved + SHARE, MAX_SAVED)

    def forget(self, seq: Sequence) -> None:
        self._acceptance.forget(seq)
        self._evidence.pop(seq, None)

    def _charge(self, gained: float) -> None:
        """Settles a step that waited for drafts; ``gained`` in steps without them. Probes have an account of their own,
        but what they gain shows that drafts are good again."""
        gained = max(gained, -MAX_CHARGE)
        if self._asked_as_probe:
            self._saved += min(gained, 0.0)
            if self._asked:
                self._distance = PAUSE if gained > 0 else min(2 * self._distance, MAX_PAUSE)
        if not self._asked_as_probe or gained > 0:
            self._credit = min(self._credit + gained, MAX_CREDIT)
        self._broke = self._credit < (RESUME if self._broke else 0.0)

    def _best(
        self, value_X: np.ndarray, weight_X: np.ndarray, depth_X: np.ndarray | None
    ) -> tuple[int, float]:
        """How many drafts, the likeliest first, make most tokens per second; and how many those are.

        Args:
            value_X: probability that a draft yields a token, if it is offered; ``weight_X``: that it is offered.
            depth_X: tokens before each draft; None if the drafts are made already.
        """
        order = _likeliest(value_X)[: self._max_step_drafts]
        drafts_X = np.concatenate([[0.0], np.cumsum(weight_X[order])])
        gained_X = np.concatenate([[0.0], np.cumsum((value_X * weight_X)[order])])
        seconds_X = self._costs.verifying_seconds(self._tokens + drafts_X, self._rows + drafts_X)
        if depth_X is not None:
            deepest_X = np.maximum.accumulate(np.concatenate([[0], 1 + depth_X[order]]))
            seconds_X = seconds_X + self._costs.drafting_seconds()[deepest_X]
        rate_X = (self._rows + gained_X) / seconds_X
        count = int(rate_X.argmax())
        return count, float(rate_X[count])

    def _worth_asking(self, depth_X: np.ndarray, plain: float) -> int:
        """How deep drafts are asked for: one more than is expected to pay, if depth costs something."""
        seconds_K = self._costs.drafting_seconds()
        if seconds_K[-1] - seconds_K[0] < (STAY - 1) * plain:
            return len(seconds_K) - 1
        return int(depth_X.max(initial=0)) + 2

    def _verifying_seconds(self, drafts: int) -> float:
        tokens, rows = np.array(self._tokens + drafts), np.array(self._rows + drafts)
        return float(self._costs.verifying_seconds(tokens, rows))

    @property
    def _probe_drafts(self) -> int:
        """What fits in the next larger step."""
        return min(1 + self._costs.room(self._tokens + 1), self._max_step_drafts)

    def _may_probe(self, gain_X: np.ndarray, plain: float) -> bool:
        """Whether the account covers what a probe is expected to lose; all it costs, if estimates were wrong before.

        Args:
            gain_X: tokens that each draft is expected to yield.
        """
        with_drafts = self._verifying_seconds(self._probe_drafts) + float(self._costs.drafting_seconds()[1])
        cost = with_drafts / plain - 1
        gained = 0.0 if self._broke else float(np.sort(gain_X)[-self._probe_drafts :].sum()) / self._rows
        return cost > 0 and self._saved >= cost - gained and self._saved > 0

    def _probe(self, offered: Seq[int]) -> list[int]:
        """One draft of each sequence, as far as the probe reaches, then a second one, and so on."""
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
