"""The result of scheduling: what the next step computes."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxinfer.kv_cache.manager import BlockCopy
from jaxinfer.request import Sequence


class ScheduledRow(NamedTuple):
    """The tokens of one sequence in a step. A named tuple, as thousands are made in a second, and they are made fast.

    Attributes:
        start: position of the first token to compute.
        num_tokens: at least 1.
        samples: the last token's logits are sampled; False for prefill chunks that do not reach the end.
        epoch: the sequence's epoch when it was planned.
        num_outputs: tokens that the sequence had generated, those in flight included.
        drafts: the row's last tokens, which are guesses: each of them, and the token before the first one, is sampled,
            and a sample that equals the draft behind it makes the next sample count.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    epoch: int
    num_outputs: int
    drafts: tuple[int, ...] = ()

    @property
    def num_samples(self) -> int:
        """Positions whose logits are sampled: those of the last tokens."""
        return 1 + len(self.drafts) if self.samples else 0


@dataclass(frozen=True)
class StepPlan:
    """One step.

    Attributes:
        rows: in the order of the batch.
        admitted: sequences that took a batch slot in this pass; their slots' sampler state must be set.
        copies: blocks to copy before anything is written.
        preempted: number of sequences that lost their blocks since the last plan.
    """

    rows: tuple[ScheduledRow, ...]
    admitted: tuple[Sequence, ...]
    copies: tuple[BlockCopy, ...]
    preempted: int

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def drafted(self) -> bool:
        """Whether a row verifies drafts."""
        return any(row.drafts for row in self.rows)

    @property
    def constrained(self) -> bool:
        """Whether a row is sampled under a mask that depends on the tokens before."""
        return any(row.samples and row.seq.constraint is not None for row in self.rows)
