"""The queue of waiting sequences, in the order in which they will be admitted."""

import bisect
from collections.abc import Iterator

from jaxinfer.request import Sequence


class WaitingQueue:
    """Waiting sequences sorted by urgency: arrival order, or (priority, arrival).

    A preempted sequence keeps its arrival number, so those that came later cannot pass it.
    """

    def __init__(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._items: list[Sequence] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_tokens

    def key(self, seq: Sequence) -> tuple[int, int]:
        return seq.urgency if self._by_priority else (0, seq.order)

    def add(self, seq: Sequence) -> None:
        bisect.insort(self._items, seq, key=self.key)
        self._num_tokens += seq.num_prompt

    def remove(self, seq: Sequence) -> None:
        index = bisect.bisect_left(self._items, self.key(seq), key=self.key)
        assert self._items[index] is seq, "a sequence to remove must be waiting"
        del self._items[index]
        self._num_tokens -= seq.num_prompt
