"""Drafters for tests, loaded like a user's: ``speculative.drafter: tests/support/drafters.py:Name``."""

from collections.abc import Sequence
from zlib import crc32

from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.request import Sequence as Seq
from jaxinfer.speculative.drafter import DraftJob


class FewTokens:
    """Drafts as many tokens as it may, out of few: a target that likes these accepts some of them.

    What it proposes depends on the tokens of the sequence alone.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.seen: set[Seq] = set()

    def propose(self, jobs: Sequence[DraftJob]) -> list[tuple[int, ...]]:
        return [self._drafts(job) for job in jobs]

    def forget(self, seq: Seq) -> None:
        self.seen.discard(seq)

    def _drafts(self, job: DraftJob) -> tuple[int, ...]:
        self.seen.add(job.seq)
        state = crc32(str(job.seq.token_ids(0, job.seq.num_tokens)).encode())
        return tuple(65 + (state >> 2 * i) % 3 for i in range(job.limit))


class Greedy(FewTokens):
    """More than it may."""

    def _drafts(self, job: DraftJob) -> tuple[int, ...]:
        return (65,) * (job.limit + 5)
