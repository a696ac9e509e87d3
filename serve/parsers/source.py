"""Reading text that arrives in pieces.

Parsers are generators that yield when they need more text, so that they read like parsers of a whole text. What they do
depends on the text alone, never on where a piece ends: each function here waits until the text decides.
"""

import functools
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields to wait for more text; returns a T."""
Sink = Callable[[str], None]

SPACE = " \t\r\n"


class Source:
    """Text as far as it has arrived, and a place in it.

    Attributes:
        text: what is kept of the text; everything from ``position`` on, and from the held place if there is one.
        ended: nothing more will come.
    """

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.ended = False
        self._held: int | None = None

    def push(self, text: str) -> None:
        keep = self.position if self._held is None else self._held
        self.text = self.text[keep:] + text
        self.position -= keep
        if self._held is not None:
            self._held = 0

    def hold(self) -> None:
        """Remembers this place, for ``held`` and ``rewind``."""
        self._held = self.position

    def release(self) -> None:
        self._held = None

    def held(self) -> str:
        """The text read since ``hold``; releases it."""
        assert self._held is not None, "hold comes first"
        text = self.text[self._held : self.position]
        self._held = None
        return text

    def rewind(self) -> None:
        """Goes back to the held place and releases it."""
        assert self._held is not None, "hold comes first"
        self.position = self._held
        self._held = None

    def take_to(self, position: int) -> str:
        """The text up to a position, which is read with it."""
        text = self.text[self.position : position]
        self.position = position
        return text


def peek(source: Source) -> Steps[str]:
    """The next character, which stays; empty at the end."""
    while source.position >= len(source.text):
        if source.ended:
            return ""
        yield
    return source.text[source.position]


def read_while(source: Source, allowed: Callable[[str], bool], most: int | None = None) -> Steps[str]:
    """The next characters as long as they are allowed, and at most so many."""
    parts: list[str] = []
    while most is None or len(parts) < most:
        character = yield from peek(source)
        if not character or not allowed(character):
            break
        source.position += 1
        parts.append(character)
    return "".join(parts)


def skip_space(source: Source) -> Steps[str]:
    """JSON white space; returns it."""
    return (yield from read_while(source, lambda character: character in SPACE))


def literal(source: Source, text: str) -> Steps[bool]:
    """Reads ``text`` if it comes next; otherwise reads nothing."""
    while True:
        there = source.text[source.position : source.position + len(text)]
        if there == text:
            source.position += len(text)
            return True
        if source.ended or not text.startswith(there):
            return False
        yield


class _Marks:
    """Strings to look for; the shorter one of two that begin alike, as it is certain first."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._any = re.compile("|".join(map(re.escape, sorted(marks, key=len))) or "(?!)")
        self._first = re.compile("|".join({re.escape(mark[0]) for mark in marks}) or "(?!)")
        self._beginnings = {mark[:length] for mark in marks for length in range(1, len(mark))}
        self._longest = max(map(len, marks), default=1) - 1

    def find(self, text: str, start: int) -> re.Match[str] | None:
        # Most pieces have no character that begins a mark.
        return self._any.search(text, start) if self._first.search(text, start) is not None else None

    def open_end(self, text: str, start: int) -> int:
        """Where the beginning of a mark at the end of the text stands; the text's length if there is none."""
        at = max(start, len(text) - self._longest)
        while (first := self._first.search(text, at)) is not None:
            at = first.start()
            if text[at:] in self._beginnings:
                return at
            at += 1
        return len(text)


_marks = functools.lru_cache(maxsize=64)(_Marks)


def text_until(source: Source, marks: tuple[str, ...], sink: Sink) -> Steps[str | None]:
    """Passes on the text before the first of ``marks``, as early as it is certain.

    Returns:
        The mark, which is next in the source; None if the text ends without one.
    """
    known = _marks(marks)
    while True:
        text, start = source.text, source.position
        found = known.find(text, start)
        if found is not None:
            _pass_on(source, found.start(), sink)
            return found[0]
        if source.ended:
            _pass_on(source, len(text), sink)
            return None
        _pass_on(source, known.open_end(text, start), sink)
        yield


def _pass_on(source: Source, end: int, sink: Sink) -> None:
    if end > source.position:
        sink(source.take_to(end))


def all_text(source: Source, sink: Sink) -> Steps[None]:
    """Passes on the text to its end."""
    yield from text_until(source, (), sink)
