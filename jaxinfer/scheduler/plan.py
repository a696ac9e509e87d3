"""The result of scheduling: what the next step computes."""

from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from jaxinfer.drafts import NO_DRAFTS, Drafts
from jaxinfer.kv_cache.manager import BlockCopy, SlotMove
from jaxinfer.request import Sequence


class ScheduledRow(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one sequence in a step. A ``Struct``, as tens of thousands are made in a second: it is made and
    read fast, and the garbage collector does not walk over it (nothing that a row holds refers to rows).

    Attributes:
        start: position of the first token to compute.
        num_tokens: at least 1.
        samples: the last token's logits are sampled; False for prefill chunks that do not reach the end.
        epoch: the sequence's epoch when it was planned.
        num_outputs: tokens that the sequence had generated, those in flight included.
        drafts: the row's last tokens, which are guesses: each of them, and the token before the first one, is sampled,
            and a draft that equals the sample before it makes the sample behind it count.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    epoch: int
    num_outputs: int
    drafts: Drafts = NO_DRAFTS

    @property
    def num_samples(self) -> int:
        """Positions whose logits are sampled: those of the last tokens."""
        return 1 + len(self.drafts.tokens) if self.samples else 0


TakeContent = Callable[[tuple[int, ...], int, tuple[Any, ...]], None]
"""(layers, index of the first block, K and V of each layer ``[C, K, S, h]``): device arrays, still being computed."""


@dataclass(frozen=True)
class BlockRead:
    """Blocks of a group whose content is wanted as soon as the step has computed it, for another engine.

    Attributes:
        take: called by the runner while it dispatches, once for each part; it must not wait.
    """

    group: int
    blocks: tuple[int, ...]
    take: TakeContent


@dataclass(frozen=True)
class StepPlan:
    """One step.

    Attributes:
        rows: in the order of the batch.
        admitted: sequences that took a batch slot in this pass; their slots' sampler state must be set.
        copies: blocks to copy before anything is written.
        preempted: number of sequences that lost their blocks since the last plan.
        reads: blocks that leave the device behind the step.
    """

    rows: tuple[ScheduledRow, ...]
    admitted: tuple[Sequence, ...]
    copies: tuple[BlockCopy, ...]
    preempted: int
    reads: tuple[BlockRead, ...] = ()

    @cached_property
    def num_tokens(self) -> int:
        return sum([row.num_tokens for row in self.rows])

    @cached_property
    def drafted(self) -> bool:
        """Whether a row verifies drafts."""
        return any(row.drafts.tokens for row in self.rows)

    @cached_property
    def constrained(self) -> bool:
        """Whether a row is sampled under a mask that depends on the tokens before."""
        return any(row.seq.constraint is not None and row.samples for row in self.rows)


def accepted_moves(row: ScheduledRow, path: Sequence_[int], block_size: int) -> list[SlotMove]:
    """Moves that bring K and V of a row's accepted drafts to the slots of their positions.

    Args:
        path: the accepted drafts, from the first position on. In a chain they are in their places.
    """
    first = row.start + row.num_tokens - len(row.drafts)
    moves = []
    for depth, node in enumerate(path):
        if node != depth:
            source, target = divmod(first + node, block_size), divmod(first + depth, block_size)
            for group, table in enumerate(row.seq.tables):
                moves.append(
                    SlotMove(
                        group,
                        table[source[0]] * block_size + source[1],
                        table[target[0]] * block_size + target[1],
                    )
                )
    return moves
