"""Speculation as the step loop sees it: gives drafts to sequences before a step is planned."""

from collections.abc import Iterable

from jaxinfer.request import Sequence, Status
from jaxinfer.speculative.drafter import Drafter, DraftJob
from jaxinfer.speculative.lengths import DraftLengths


class Speculation:
    """Asks a drafter for the sequences that can use drafts, and keeps within the limits.

    Args:
        max_drafts: of a sequence in a step.
        max_step_drafts: of all sequences in a step.
    """

    def __init__(self, drafter: Drafter, max_drafts: int, max_step_drafts: int) -> None:
        self._drafter = drafter
        self._max_step_drafts = max_step_drafts
        self._lengths = DraftLengths(max_drafts)

    def wants(self, running: Iterable[Sequence]) -> bool:
        """Whether a sequence could use drafts, once all its tokens are known."""
        return any(self._limit(seq) > 0 for seq in running)

    def draft(self, running: Iterable[Sequence]) -> None:
        """Sets the drafts of sequences of which nothing is in flight; the first ones get theirs first."""
        jobs = []
        for seq in running:
            seq.drafts = ()
            if limit := self._limit(seq):
                jobs.append(DraftJob(seq, limit))
        left = self._max_step_drafts
        for job, drafts in zip(jobs, self._drafter.propose(jobs) if jobs else []):
            job.seq.drafts = drafts[: min(job.limit, left)]
            left -= len(job.seq.drafts)

    def verified(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self._lengths.verified(seq, drafted, accepted)

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._drafter.forget(seq)
        self._lengths.forget(seq)

    def _limit(self, seq: Sequence) -> int:
        """Drafts that a sequence can use: the last of the tokens that it may still get is sampled, not drafted.

        ``max_tokens`` is cut to the room in the context, so positions behind it are never drafted either.
        """
        if seq.status is not Status.RUNNING or seq.num_computed + 1 < seq.num_tokens:
            return 0
        generated = len(seq.output_token_ids) + seq.num_in_flight
        return max(0, min(self._lengths.limit(seq), seq.max_tokens - generated - 1))
