"""Calls as JSON objects, which most formats have in common, and the events that come of them."""

import enum
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from serve.parsers.base import Event, TextDelta, ToolArgumentsDelta, ToolCallStart
from serve.parsers.json_scanner import End, JsonScanner, pass_value, read_value
from serve.parsers.source import SPACE, Source, Steps, literal, peek, skip_space

NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
HELD_CHARACTERS = 256
"""Arguments are given out when they are complete, or longer than this: then they are streamed as they come."""
OTHER_KEYS = ("id", "type", "index", "tool_call_id")


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters and digits: templates of Mistral models refuse other ids in the history."""
    return secrets.token_hex(5)[:9]


class CallOutput:
    """Collects the events of a choice.

    White space is left out where it only separates: before the first call if nothing else came before it, between
    calls, and after the last one.

    Args:
        names: functions that there are.
        new_id: makes the id of a call.
        max_calls: later calls are left out, and not counted; None: no limit.
    """

    def __init__(
        self, names: frozenset[str], new_id: Callable[[], str] = call_id, max_calls: int | None = None
    ) -> None:
        self.num_complete_calls = 0
        self._names = names
        self._new_id = new_id
        self._max_calls = max_calls
        self._events: list[Event] = []
        self._num_calls = 0
        self._space = ""  # since the beginning, or the last call, if there was nothing else
        self._between = True

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def content(self, text: str) -> None:
        if not text:
            return
        if self._between:
            text = self._space + text
            self._between = not text.strip(SPACE)
            self._space = text if self._between else ""
        if not self._between:
            self._events.append(TextDelta(text))

    def finish(self) -> None:
        if self._num_calls == 0 and self._space:
            self._events.append(TextDelta(self._space))

    def knows(self, name: str) -> bool:
        return name in self._names

    @property
    def _left_out(self) -> bool:
        return self._max_calls is not None and self._num_calls > self._max_calls

    def start(self, name: str) -> None:
        self._space, self._between = "", True
        self._num_calls += 1
        if not self._left_out:
            self._events.append(ToolCallStart(self._num_calls - 1, self._new_id(), name))

    def arguments(self, text: str) -> None:
        """Of the call that was started last."""
        if not self._left_out:
            self._events.append(ToolArgumentsDelta(self._num_calls - 1, text))

    def complete(self) -> None:
        if not self._left_out:
            self.num_complete_calls += 1


class Outcome(enum.Enum):
    """How reading a call ended.

    ``NOT_A_CALL``: nothing was given out, the text is content. ``BROKEN``: the call was given out, but its arguments do
    not go on as JSON, or are cut.
    """

    COMPLETE = enum.auto()
    NOT_A_CALL = enum.auto()
    BROKEN = enum.auto()


def named_call(source: Source, output: CallOutput, name: str) -> Steps[Outcome]:
    """A call whose name was read, and whose arguments come next.

    Arguments that break among the first ``HELD_CHARACTERS`` are not a call; those that are cut begin one.
    """
    if not output.knows(name) or (yield from peek(source)) != "{":
        return Outcome.NOT_A_CALL
    arguments = _Arguments(source, output, name)
    end = yield from pass_value(source, arguments.add)
    if end is End.BROKEN and not arguments.started:
        return Outcome.NOT_A_CALL
    arguments.start()
    if end is not End.DONE:
        return Outcome.BROKEN
    output.complete()
    return Outcome.COMPLETE


class _Arguments:
    """Holds the first part of a call back."""

    def __init__(self, source: Source, output: CallOutput, name: str) -> None:
        self.started = False
        self._source = source
        self._output = output
        self._name = name
        self._held = ""

    def add(self, text: str) -> None:
        if self.started:
            self._output.arguments(text)
            return
        self._held += text
        if len(self._held) > HELD_CHARACTERS:
            self.start()

    def start(self) -> None:
        if not self.started:
            self.started = True
            self._source.release()  # it is a call now, so its text need not be kept
            self._output.start(self._name)
            self._output.arguments(self._held)


@dataclass
class _Call:
    """What is known of a call so far.

    Attributes:
        arguments: as long as the name is not known.
        outcome: set once the call was given out, or cannot be.
    """

    name: str | None = None
    arguments: str | None = None
    outcome: Outcome | None = None


def call_object(source: Source, output: CallOutput, only_known_keys: bool) -> Steps[Outcome]:
    """A call ``{"name": ..., "arguments": {...}}``, keys in any order, ``parameters`` for ``arguments``; or such an
    object below the key ``function``.

    It is complete with its name and its arguments, also if the object is not closed as it should be. Arguments that
    are a JSON text within a string count as what they say; null or no arguments are ``{}``.

    Args:
        only_known_keys: an object with other keys is not a call (for formats that do not mark their calls).
    """
    call = _Call()
    closed = yield from _object(source, output, call, only_known_keys, nested=False)
    if call.outcome is None and closed and call.name is not None:
        call.arguments = "{}"
        _give_out(source, output, call)
    elif call.outcome is Outcome.COMPLETE and not closed:
        source.rewind()
    elif call.outcome is Outcome.COMPLETE:
        source.release()
    return call.outcome or Outcome.NOT_A_CALL


def _object(
    source: Source, output: CallOutput, call: _Call, only_known_keys: bool, nested: bool
) -> Steps[bool]:
    """The object of a call; whether it is one, to its end."""
    if not (yield from literal(source, "{")):
        return False
    while True:
        yield from skip_space(source)
        key = yield from _read_string(source)
        yield from skip_space(source)
        if key is None or not (yield from literal(source, ":")):
            return False
        yield from skip_space(source)
        first = yield from peek(source)
        if key == "function" and first == "{" and not nested:
            fine = yield from _object(source, output, call, only_known_keys, nested=True)
        elif key in NAME_KEYS:
            fine = yield from _name(source, output, call)
        elif key in ARGUMENT_KEYS:
            fine = yield from _arguments(source, output, call)
        elif key in OTHER_KEYS or not only_known_keys:
            fine = (yield from read_value(source)) is not None
        else:
            fine = False
        if not fine:
            return False
        yield from skip_space(source)
        if not (yield from literal(source, ",")):
            return (yield from literal(source, "}"))


def _name(source: Source, output: CallOutput, call: _Call) -> Steps[bool]:
    name = yield from _read_string(source)
    if name is None or call.name is not None or not output.knows(name):
        return False
    call.name = name
    if call.arguments is not None:
        _give_out(source, output, call)
    return True


def _arguments(source: Source, output: CallOutput, call: _Call) -> Steps[bool]:
    if call.arguments is not None or call.outcome is not None:
        return False
    first = yield from peek(source)
    if first == "{" and call.name is not None:
        call.outcome = yield from named_call(source, output, call.name)
        if call.outcome is Outcome.COMPLETE:
            source.hold()
        return call.outcome is Outcome.COMPLETE
    text = yield from read_value(source)
    if text is not None and first == '"':
        text = str(json.loads(text))
    if text is None or not (text == "null" or _is_object(text)):
        return False
    call.arguments = "{}" if text == "null" else text
    if call.name is not None:
        _give_out(source, output, call)
    return True


def _give_out(source: Source, output: CallOutput, call: _Call) -> None:
    """A call whose name and arguments are known; the source then holds the place behind them."""
    assert call.name is not None
    assert call.arguments is not None
    output.start(call.name)
    output.arguments(call.arguments)
    output.complete()
    call.outcome = Outcome.COMPLETE
    source.hold()


def _read_string(source: Source) -> Steps[str | None]:
    """A JSON string, decoded; None if there is none, or the text ends within it."""
    if (yield from peek(source)) != '"':
        return None
    text = yield from read_value(source)
    return None if text is None else str(json.loads(text))


def _is_object(text: str) -> bool:
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        return False  # from escapes within a string; no client could be sent this
    scanner = JsonScanner()
    end = scanner.feed(text)
    return scanner.done and text.lstrip(SPACE).startswith("{") and not text[end:].strip(SPACE)


def call_sequence(source: Source, output: CallOutput, only_known_keys: bool) -> Steps[Outcome]:
    """Calls as one object, as objects with white space, ``,`` or ``;`` between them, or as a list of objects.

    The source holds the place before what is not a call: with ``NOT_A_CALL`` that is the beginning, or what follows the
    calls that are complete.
    """
    yield from skip_space(source)
    in_list = yield from literal(source, "[")
    yield from skip_space(source)
    while True:
        outcome = yield from call_object(source, output, only_known_keys)
        if outcome is not Outcome.COMPLETE:
            return outcome
        source.hold()
        yield from skip_space(source)
        if in_list and (yield from literal(source, "]")):
            source.release()
            return Outcome.COMPLETE
        if not (yield from literal(source, ",")) and not in_list:
            yield from literal(source, ";")
        yield from skip_space(source)
        following = yield from peek(source)
        if following != "{":
            if following:
                source.rewind()  # otherwise the text was cut between two calls
            return Outcome.COMPLETE
