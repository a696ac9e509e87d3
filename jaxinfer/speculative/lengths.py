"""How many drafts a sequence gets: as many as it has lately accepted, and a few more."""

from jaxinfer.request import Sequence


class DraftLengths:
    """Draft lengths per sequence, from 1 to a limit.

    A sequence whose drafts were all accepted gets twice as many next time; one that rejected a draft gets one more
    than it accepted. So text that repeats itself is drafted in long pieces, and other text costs one token a step.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lengths: dict[Sequence, int] = {}

    def limit(self, seq: Sequence) -> int:
        return self._lengths.get(seq, self._limit)

    def verified(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """Takes note of a verified draft."""
        wanted = 2 * drafted if accepted == drafted else accepted + 1
        self._lengths[seq] = min(self._limit, wanted)

    def forget(self, seq: Sequence) -> None:
        self._lengths.pop(seq, None)
