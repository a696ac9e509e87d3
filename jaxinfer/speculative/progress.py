"""How far a draft model has computed each sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.request import Sequence as Seq


@dataclass(frozen=True)
class _Progress:
    """Attributes:
    computed: leading tokens whose K and V are in the pool.
    guess: what was taken for the tokens behind them, and computed.
    """

    computed: int
    guess: tuple[int, ...] = ()


_NOTHING = _Progress(0)


class DraftProgress:
    """Tokens of each running sequence, from the first on, whose K and V of the draft model are in the pool."""

    def __init__(self) -> None:
        self._of: dict[Seq, _Progress] = {}

    def admitted(self, seq: Seq, num_tokens: int) -> None:
        """A sequence got blocks in which so many tokens are computed already: prefix hits, or those of its parent."""
        self._of[seq] = _Progress(num_tokens)

    def computed(self, seq: Seq, start: int, stop: int, guess: Sequence[int] = ()) -> None:
        """Tokens ``start`` to ``stop`` are computed; behind a gap that does not help.

        Args:
            guess: drafts behind them that are computed as well; those count that turn out to be right.
        """
        if start <= self._of.get(seq, _NOTHING).computed or start <= self.of(seq):
            self._of[seq] = _Progress(stop, tuple(guess))

    def of(self, seq: Seq) -> int:
        progress = self._of.get(seq, _NOTHING)
        if progress.guess:
            first = progress.computed
            known = seq.token_ids(first, min(seq.num_tokens - seq.num_in_flight, first + len(progress.guess)))
            self._of[seq] = progress = _Progress(first + _num_equal(progress.guess, known))
        return progress.computed

    def forget(self, seq: Seq) -> None:
        self._of.pop(seq, None)


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Leading tokens that are equal."""
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
