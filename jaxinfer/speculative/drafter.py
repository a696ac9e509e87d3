"""What guesses tokens, and what the engine promises it.

Drafts are verified by sampling: at each position the target draws the token that it would draw without drafts, from its
own processed law and with the position's own random number, and a draft counts if it equals that token. So a request
gets the same tokens whatever a drafter proposes; a drafter only decides how many of them one step yields. A draft ``d``
is accepted with probability ``p(d)``, which for a draft that is a function of the context is the ``min(1, p / q)`` of
speculative sampling (Leviathan et al. 2023, arXiv:2211.17192).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxinfer.drafts import Drafts
from jaxinfer.request import Sequence as Seq


@dataclass(frozen=True)
class DraftJob:
    """A sequence whose next tokens are to be guessed.

    Attributes:
        seq: all its tokens are known; not to be changed.
        limit: most drafts that can be used, at least 1.
        depth: positions behind the newest token that can be used; chains end at ``limit``, which is not larger.
        slots: places behind the newest token that have blocks, for drafters with K and V of their own.
    """

    seq: Seq
    limit: int
    depth: int
    slots: int = 0


class Drafter(Protocol):
    """Guesses tokens of running sequences. One thread calls it, between two steps."""

    def propose(self, jobs: Sequence[DraftJob]) -> Sequence[tuple[int, ...] | Drafts]:
        """Drafts for each job: tokens that may follow its newest one, at most ``limit``, or none.

        A tuple is a chain. With ``speculative.trees`` it may be ``Drafts.tree(tokens, parents)``.
        """
        ...

    def forget(self, seq: Seq) -> None:
        """The sequence has ended; called for every sequence, also for those it never saw."""
        ...


class DeviceDrafter(Drafter, Protocol):
    """A drafter that computes beside the target, with K and V of its own in the target's blocks."""

    @property
    def slots(self) -> int:
        """Places behind the newest token that it can use, even if fewer drafts are wanted."""
        ...
