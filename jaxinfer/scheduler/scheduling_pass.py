"""What one scheduling pass has given out so far."""

from collections.abc import Container

from jaxinfer.drafts import NO_DRAFTS, Drafts
from jaxinfer.kv_cache.manager import BlockCopy
from jaxinfer.request import Sequence


class Pass:
    """Budget, rows and admissions of a step that is being planned.

    Attributes:
        busy: sequences of other batches.
        most: sequences that the step may have.
        displaced: running sequences whose plan was cancelled in favour of more urgent ones, and the tokens that were
            planned; least urgent first.
    """

    def __init__(self, budget: int, busy: Container[Sequence] = frozenset(), most: int = 0) -> None:
        self.budget = budget
        self.busy = busy
        self.most = most
        self.planned: dict[Sequence, int] = {}
        self.drafts: dict[Sequence, Drafts] = {}
        self.admitted: dict[Sequence, list[BlockCopy]] = {}
        self.displaced: list[tuple[Sequence, int]] = []
        self.preempted = 0

    @property
    def full(self) -> bool:
        return self.budget == 0 or len(self.planned) >= self.most

    def plan(self, seq: Sequence, count: int, drafts: Drafts = NO_DRAFTS) -> None:
        assert count > 0, "a planned sequence computes at least one token"
        if drafts.tokens:
            self.drafts[seq] = drafts
            count += len(drafts)
        self.planned[seq] = count
        self.budget -= count

    def cancel(self, seq: Sequence) -> None:
        self.drafts.pop(seq, None)
        self.budget += self.planned.pop(seq, 0)
        self.admitted.pop(seq, None)
