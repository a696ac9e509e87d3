"""Parsers put together: special tokens, then reasoning, then calls."""

from collections.abc import Iterable

from serve.parsers.base import Event, OutputParser, ReasoningDelta, TextDelta
from serve.parsers.calls import CallOutput
from serve.parsers.formats import Format
from serve.parsers.reasoning import split_reasoning
from serve.parsers.source import Sink, Source, Steps, literal, text_until


class Stepper:
    """Runs the steps of a parser as text arrives."""

    def __init__(self, source: Source, steps: Steps[None]) -> None:
        self._source = source
        self._steps = steps

    def push(self, text: str) -> None:
        self._source.push(text)
        next(self._steps, None)

    def finish(self) -> None:
        self._source.ended = True
        for _ in self._steps:
            raise AssertionError("a parser waits for text after the end")


class ToolParser:
    """Content and calls in one format."""

    def __init__(self, read: Format, output: CallOutput) -> None:
        source = Source()
        self._output = output
        self._stepper = Stepper(source, read(source, output))

    def push(self, text: str) -> list[Event]:
        self._stepper.push(text)
        return self._output.take()

    def finish(self) -> list[Event]:
        self._stepper.finish()
        self._output.finish()
        return self._output.take()

    @property
    def num_complete_calls(self) -> int:
        return self._output.num_complete_calls


class ReasoningParser:
    """Reasoning, and what follows it as another parser reads it.

    Args:
        inside: the prompt opened the reasoning.
        content: reads the text after the reasoning.
    """

    def __init__(self, content: OutputParser, inside: bool) -> None:
        self._content = content
        self._events: list[Event] = []
        source = Source()
        steps = split_reasoning(source, self._on_reasoning, self._on_content, inside)
        self._stepper = Stepper(source, steps)

    def push(self, text: str) -> list[Event]:
        self._stepper.push(text)
        return self._take()

    def finish(self) -> list[Event]:
        self._stepper.finish()
        self._events += self._content.finish()
        return self._take()

    @property
    def num_complete_calls(self) -> int:
        return self._content.num_complete_calls

    def _on_reasoning(self, text: str) -> None:
        self._events.append(ReasoningDelta(text))

    def _on_content(self, text: str) -> None:
        self._events += self._content.push(text)

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class HiddenTokens:
    """Takes the strings of special tokens out of a text that another parser reads.

    Marks of calls or reasoning that are special tokens are hidden with ``skip_special_tokens``, so such requests are
    decoded without it, and this hides all the others.
    """

    def __init__(self, inner: OutputParser, strings: Iterable[str]) -> None:
        self._inner = inner
        self._parts: list[str] = []
        source = Source()
        self._stepper = Stepper(source, _without(source, tuple(strings), self._parts.append))

    def push(self, text: str) -> list[Event]:
        self._stepper.push(text)
        return self._inner.push(self._take())

    def finish(self) -> list[Event]:
        self._stepper.finish()
        return [*self._inner.push(self._take()), *self._inner.finish()]

    @property
    def num_complete_calls(self) -> int:
        return self._inner.num_complete_calls

    def _take(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        return text


class PlainParser:
    """All text is content."""

    @property
    def num_complete_calls(self) -> int:
        return 0

    def push(self, text: str) -> list[Event]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Event]:
        return []


def _without(source: Source, strings: tuple[str, ...], sink: Sink) -> Steps[None]:
    while (found := (yield from text_until(source, strings, sink))) is not None:
        yield from literal(source, found)
