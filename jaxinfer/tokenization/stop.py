"""Stop strings, found in a stream of text whose pieces may cut them anywhere."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """Attributes:
    text: new text that cannot become part of a stop string any more.
    stop: the stop string that ended the text, or None.
    """

    text: str
    stop: str | None


class StopMatcher:
    """Ends a text at the first stop string that is complete (Aho and Corasick, CACM 18(6), 1975).

    The match that ends first wins, as the model is stopped there; of those that end together the longest, so
    that as much as possible is removed. Both rules look at single characters, so the result does not depend
    on how the text was cut. Held back is exactly the longest end of the text that begins some stop string.
    Time is linear in the text and in the total length of the stop strings.

    Args:
        include_stop: whether the stop string is part of the text that is given out.

    Raises:
        ValueError: an empty stop string.
    """

    def __init__(self, stop_strings: Sequence[str], include_stop: bool = False) -> None:
        if "" in stop_strings:
            raise ValueError("a stop string is empty; each needs at least one character")
        self._include_stop = include_stop
        self._next: dict[tuple[int, str], int] = {}
        self._depth = [0]
        self._stop_at: list[str | None] = [None]
        for stop in stop_strings:
            self._insert(stop)
        self._fail = [0] * len(self._depth)
        self._link()
        self._node = 0
        self._held = ""
        self._seen = 0
        self._stop: str | None = None

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._stop

    @property
    def match_begin(self) -> int:
        """Offset of the match, in characters of all the text fed; only after a match."""
        return self._seen - len(self._found())

    @property
    def match_end(self) -> int:
        """Offset just behind the match; only after a match."""
        return self._seen if self._found() else 0

    @property
    def held(self) -> str:
        """Text fed and not given out yet, because it may begin a stop string."""
        return self._held

    def feed(self, text: str) -> StopResult:
        """Adds text. After a match, text is ignored and the match is returned again."""
        if self._stop is not None:
            return StopResult("", self._stop)
        if len(self._depth) == 1:
            self._seen += len(text)
            return StopResult(text, None)
        for index, char in enumerate(text):
            self._node = self._step(self._node, char)
            if self._stop_at[self._node] is not None:
                return self._matched(text, index + 1)
        self._seen += len(text)
        text = self._held + text
        kept = len(text) - self._depth[self._node]
        self._held = text[kept:]
        return StopResult(text[:kept], None)

    def skip(self, text: str) -> str:
        """Adds text in which no stop string counts, not even one that begins there. Returns the text to give
        out.
        """
        if self._stop is not None:
            return ""
        text = self.flush() + text
        self._seen += len(text)
        return text

    def flush(self) -> str:
        """Ends the text: gives out what is held back. A match cannot span a flush."""
        text, self._held, self._node = self._held, "", 0
        return text

    def _matched(self, text: str, end: int) -> StopResult:
        stop = self._stop_at[self._node]
        assert stop is not None
        self._stop = stop
        self._seen += end
        shown = self._held + text[:end]
        self._held = ""
        return StopResult(shown if self._include_stop else shown[: len(shown) - len(stop)], stop)

    def _found(self) -> str:
        if self._stop is None:
            raise ValueError("no stop string was found yet")
        return self._stop

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            key = (node, char)
            if key not in self._next:
                self._next[key] = len(self._depth)
                self._depth.append(self._depth[node] + 1)
                self._stop_at.append(None)
            node = self._next[key]
        self._stop_at[node] = stop

    def _link(self) -> None:
        """Failure links, breadth first: the longest proper suffix of a node's text that is a node too."""
        children: list[list[tuple[str, int]]] = [[] for _ in self._depth]
        for (parent, char), child in self._next.items():
            children[parent].append((char, child))
        queue = deque(child for _, child in children[0])
        while queue:
            node = queue.popleft()
            for char, child in children[node]:
                self._fail[child] = self._step(self._fail[node], char)
                queue.append(child)
            if self._stop_at[node] is None:  # else the longer one is right
                self._stop_at[node] = self._stop_at[self._fail[node]]

    def _step(self, node: int, char: str) -> int:
        while node and (node, char) not in self._next:
            node = self._fail[node]
        return self._next.get((node, char), 0)
