"""Speculation as the step loop sees it: gives drafts to sequences before a step is planned."""

import sys
import time
from collections.abc import Callable, Iterable

from jaxinfer.drafts import NO_DRAFTS, Drafts
from jaxinfer.observability.snapshot import StepRecord
from jaxinfer.request import Sequence, Status
from jaxinfer.speculative.adaptive import AdaptiveDrafts, Candidate
from jaxinfer.speculative.constrained import within
from jaxinfer.speculative.drafter import Drafter, DraftJob
from jaxinfer.speculative.evidence import NOTHING, Evidence
from jaxinfer.speculative.lengths import DraftLengths

Reserve = Callable[[Sequence, int], int]
"""Gives a sequence blocks for so many tokens, and says how many it has blocks for."""


class Speculation:
    """Asks a drafter for the sequences that can use drafts, and keeps within the limits.

    Args:
        max_drafts: of a sequence in a step.
        max_step_drafts: of all sequences in a step.
        adaptive: decides how many drafts pay; None: every sequence gets as many as it lately accepted, and a few more.
        evidence: of a drafter that looks up, for ``adaptive``: sequences without any need not be asked about.
        reserve: for drafters that compute K and V of their own.
        slots: see ``DeviceDrafter``.
        trees: drafts may be trees; then every sequence gets as many as fit.
        max_model_len: slots of a sequence; each draft of a tree needs one.
    """

    def __init__(
        self,
        drafter: Drafter,
        max_drafts: int,
        max_step_drafts: int,
        adaptive: AdaptiveDrafts | None = None,
        *,
        evidence: Evidence | None = None,
        reserve: Reserve | None = None,
        slots: int = 0,
        trees: bool = False,
        max_model_len: int = sys.maxsize,
    ) -> None:
        assert adaptive is None or not trees, "an adaptive number of drafts is that of a chain"
        self._drafter = drafter
        self._max_drafts = max_drafts
        self._max_step_drafts = max_step_drafts
        self._lengths = DraftLengths(max_drafts)
        self._adaptive = adaptive
        self._evidence = evidence
        self._reserve = reserve
        self._slots = slots
        self._trees = trees
        self._max_model_len = max_model_len

    def wants(self, running: Iterable[Sequence]) -> bool:
        """Whether a sequence could use drafts, once all its tokens are known, and they are worth that."""
        if self._adaptive is not None and self._adaptive.rests():
            return False
        running = list(running)
        limits = {seq: limit for seq in running if (limit := self._limit(seq))}
        if self._adaptive is None:
            return bool(limits)
        promising = [c for c in self._candidates(limits) if self._promising(c)]
        # Drafts in flight count as computed until they are verified, but the next step computes a token anyway.
        left = [max(1, seq.num_tokens - seq.num_computed) for seq in running if seq.status is Status.RUNNING]
        rows = sum(tokens <= 1 for tokens in left)
        return self._adaptive.worth(promising, sum(left), rows)

    def draft(self, running: Iterable[Sequence]) -> None:
        """Sets the drafts of sequences of which nothing is in flight; the first ones get theirs first."""
        limits = {}
        for seq in running:
            seq.drafts = NO_DRAFTS
            if limit := self._limit(seq):
                limits[seq] = limit
        if self._adaptive is not None and limits:
            limits = dict(zip(limits, self._adaptive.limits(self._candidates(limits))))
        jobs = self._jobs(limits)
        started = time.perf_counter()
        proposals = self._drafter.propose(jobs) if jobs else []
        offered = [self._cut(drafts, job) for job, drafts in zip(jobs, proposals, strict=True)]
        if self._adaptive is not None:
            self._adaptive.drafted(max(map(len, offered), default=0), time.perf_counter() - started)
        for job, drafts, count in zip(jobs, offered, self._counts(jobs, [len(drafts) for drafts in offered])):
            job.seq.drafts = drafts.first(count)

    def verified(self, seq: Sequence, drafted: int, accepted: int) -> None:
        if self._adaptive is not None:
            self._adaptive.verified(seq, drafted, accepted)
        elif not self._trees:
            self._lengths.verified(seq, drafted, accepted)

    def observe(self, record: StepRecord) -> None:
        """Takes note of a committed step."""
        if self._adaptive is not None:
            self._adaptive.observe(record)

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._drafter.forget(seq)
        self._lengths.forget(seq)
        if self._adaptive is not None:
            self._adaptive.forget(seq)

    def _candidates(self, limits: dict[Sequence, int]) -> list[Candidate]:
        evidence = self._evidence
        return [
            Candidate(seq, limit, NOTHING if evidence is None else evidence(seq))
            for seq, limit in limits.items()
        ]

    def _promising(self, candidate: Candidate) -> bool:
        """A look-up that finds nothing need not be asked, but a form may force tokens, which are drafts too."""
        return bool(self._evidence is None or candidate.evidence or candidate.seq.constraint)

    def _limit(self, seq: Sequence) -> int:
        """Drafts that a sequence can use: the last of the tokens that it may still get is sampled, not drafted.

        ``max_tokens`` is cut to the room in the context, so positions behind it are never drafted either.
        """
        depth = self._depth(seq)
        if seq.status is not Status.RUNNING or seq.num_computed + 1 < seq.num_tokens or depth <= 0:
            return 0
        if seq.constraint is not None and not seq.num_in_flight and seq.constraint.forced():
            return 0  # these tokens are appended without being sampled
        room = self._max_model_len - seq.num_tokens if self._trees else depth
        most = self._lengths.limit(seq) if self._adaptive is None else self._max_drafts
        return max(0, min(most, room))

    def _depth(self, seq: Sequence) -> int:
        """Positions behind the newest token that can be drafted."""
        return seq.max_tokens - len(seq.output_token_ids) - seq.num_in_flight - 1

    def _jobs(self, limits: dict[Sequence, int]) -> list[DraftJob]:
        """With ``reserve``, drafts have blocks before they are made; without, they get them with the step."""
        if self._reserve is None:
            return [DraftJob(seq, limit, self._depth(seq)) for seq, limit in limits.items()]
        jobs = []
        left = self._max_step_drafts
        for seq, limit in limits.items():
            if not (wanted := min(limit, left)):
                break
            most = min(seq.num_tokens + max(wanted, self._slots), self._max_model_len)
            room = self._reserve(seq, most) - seq.num_tokens
            if room > 0:
                jobs.append(DraftJob(seq, min(wanted, room), self._depth(seq), room))
                left -= jobs[-1].limit
        return jobs

    def _cut(self, proposal: Drafts | tuple[int, ...], job: DraftJob) -> Drafts:
        drafts = proposal if isinstance(proposal, Drafts) else Drafts.chain(proposal)
        if not self._trees and not drafts.is_chain:
            raise ValueError("a drafter proposed a tree, but speculative.trees is off")
        drafts = drafts.first(job.limit).up_to_depth(job.depth)
        constraint = job.seq.constraint
        return drafts if constraint is None else within(drafts, constraint, min(job.limit, job.depth))

    def _counts(self, jobs: list[DraftJob], offered: list[int]) -> list[int]:
        """How many of its drafts each sequence verifies."""
        if self._adaptive is not None and jobs:
            return self._adaptive.choose(self._candidates({job.seq: job.limit for job in jobs}), offered)
        counts, left = [], self._max_step_drafts
        for count in offered:
            counts.append(min(count, left))
            left -= counts[-1]
        return counts
