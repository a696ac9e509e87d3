"""Finds the end of a JSON value while its text arrives, and whether it is JSON (RFC 8259) at all."""

import enum
import re
from typing import Literal

from serve.parsers.source import Sink, Source, Steps

MAX_DEPTH = 256
"""Deeper nesting counts as broken: readers of JSON give up on it."""

_SPACES = re.compile(r"[ \t\r\n]*")
_CHARACTERS = re.compile(r'[^"\\\x00-\x1f]*')
_DIGITS = "0123456789"
_HEX = "0123456789abcdefABCDEF"
# States of a number, by the first letter of what came last, and what may follow in each.
_NUMBER: dict[str, dict[str, str]] = {
    "minus": {"0": "zero", **dict.fromkeys("123456789", "integer")},
    "zero": {".": "point", "e": "exponent", "E": "exponent"},
    "integer": {".": "point", "e": "exponent", "E": "exponent", **dict.fromkeys(_DIGITS, "integer")},
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {"e": "exponent", "E": "exponent", **dict.fromkeys(_DIGITS, "fraction")},
    "exponent": {"+": "sign", "-": "sign", **dict.fromkeys(_DIGITS, "power")},
    "sign": dict.fromkeys(_DIGITS, "power"),
    "power": dict.fromkeys(_DIGITS, "power"),
}
_NUMBER_ENDS = frozenset({"zero", "integer", "fraction", "power"})
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}

Expect = Literal[
    "value", "value or ]", "key", "key or }", ":", "after value", "string", "escape", "hex", "number", "word"
]


class JsonScanner:
    """Reads one JSON value; white space before it is part of it.

    Attributes:
        done: the value is complete. A number at the top is complete only when something else follows it.
        broken: what came is not the beginning of a JSON value.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._expect: Expect = "value"
        self._open: list[str] = []  # the brackets and braces around this place
        self._is_key = False
        self._rest = ""  # of a word that has begun, or the state of a number
        self._num_hex = 0

    def feed(self, text: str, start: int = 0) -> int:
        """Reads on, and returns where reading stopped: behind the value, before what broke it, or at the end."""
        at = start
        while at < len(text) and not self.done and not self.broken:
            match self._expect:
                case "string":
                    at = self._string(text, at)
                case "number":
                    at = self._number(text, at)
                case "escape" | "hex" | "word":
                    at = self._within(text[at], at)
                case _:
                    at = self._between(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        at = _end(_CHARACTERS, text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._expect = "escape"
        elif text[at] == '"' and self._is_key:
            self._is_key, self._expect = False, ":"
        elif text[at] == '"':
            self._value_ended()
        else:
            self.broken = True
            return at
        return at + 1

    def _number(self, text: str, at: int) -> int:
        following = _NUMBER[self._rest].get(text[at])
        if following is not None:
            self._rest = following
            return at + 1
        if self._rest in _NUMBER_ENDS:
            self._value_ended()
        else:
            self.broken = True
        return at

    def _within(self, character: str, at: int) -> int:
        """One character of an escape or of true, false, null."""
        if self._expect == "escape" and character in '"\\/bfnrt':
            self._expect = "string"
        elif self._expect == "escape" and character == "u":
            self._expect, self._num_hex = "hex", 4
        elif self._expect == "hex" and character in _HEX:
            self._num_hex -= 1
            self._expect = "hex" if self._num_hex else "string"
        elif self._expect == "word" and character == self._rest[0]:
            self._rest = self._rest[1:]
            if not self._rest:
                self._value_ended()
        else:
            self.broken = True
            return at
        return at + 1

    def _between(self, text: str, at: int) -> int:
        """White space, and the first or only character of anything."""
        at = _end(_SPACES, text, at)
        if at == len(text):
            return at
        character, expect = text[at], self._expect
        if expect in ("key", "key or }") and character == '"':
            self._is_key, self._expect = True, "string"
        elif expect == ":" and character == ":":
            self._expect = "value"
        elif expect == "after value" and character == ",":
            self._expect = "key" if self._open[-1] == "{" else "value"
        elif (
            (expect == "key or }" and character == "}")
            or (expect == "value or ]" and character == "]")
            or (expect == "after value" and self._open[-1] + character in ("{}", "[]"))
        ):
            self._close()
        elif expect not in ("value", "value or ]") or not self._begin(character):
            self.broken = True
            return at
        return at + 1

    def _begin(self, character: str) -> bool:
        """Whether a value can begin so; it does then."""
        if character == '"':
            self._expect = "string"
        elif character in "{[" and len(self._open) < MAX_DEPTH:
            self._open.append(character)
            self._expect = "key or }" if character == "{" else "value or ]"
        elif character in _WORDS:
            self._rest, self._expect = _WORDS[character], "word"
        elif character == "-" or character in _DIGITS:
            self._rest = "minus" if character == "-" else _NUMBER["minus"][character]
            self._expect = "number"
        else:
            return False
        return True

    def _close(self) -> None:
        self._open.pop()
        self._value_ended()

    def _value_ended(self) -> None:
        self._expect = "after value"
        self.done = not self._open


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


class End(enum.Enum):
    """How reading a value ended: at its end, before something that breaks it, or with the text."""

    DONE = enum.auto()
    BROKEN = enum.auto()
    CUT = enum.auto()


def pass_value(source: Source, sink: Sink) -> Steps[End]:
    """Passes on the text of the JSON value that comes next, as it stands and as soon as it comes."""
    scanner = JsonScanner()
    while True:
        end = scanner.feed(source.text, source.position)
        if end > source.position:
            sink(source.take_to(end))
        if scanner.done or scanner.broken:
            return End.DONE if scanner.done else End.BROKEN
        if source.ended:
            return End.CUT
        yield


def read_value(source: Source) -> Steps[str | None]:
    """The text of the JSON value that comes next; None if it breaks, or the text ends within it."""
    parts: list[str] = []
    return "".join(parts) if (yield from pass_value(source, parts.append)) is End.DONE else None
