"""Texts with calls, in every format, for tests of parsers."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from serve.parsers.base import Event, Folded, OutputParser, fold
from serve.parsers.calls import CallOutput
from serve.parsers.formats import deepseek, generic_json, hermes, llama3_json, mistral
from serve.parsers.pipeline import ToolParser

FUNCTIONS = frozenset({"f", "g", "get_weather"})
READ = {
    "hermes": hermes,
    "llama3": llama3_json,
    "llama3 tag": llama3_json,
    "mistral list": mistral,
    "mistral": mistral,
    "deepseek v3": deepseek,
    "deepseek v3.1": deepseek,
    "json": generic_json,
}
FORMATS = tuple(READ)
AT_START = ("llama3", "json")
"""Formats whose calls are known by being at the beginning of the text."""
END_MARKS = {
    "hermes": "</tool_call>",
    "llama3": "}; {",
    "llama3 tag": "<|python_tag|>",
    "mistral list": "}]",
    "mistral": "[TOOL_CALLS]g[ARGS]{}",
    "deepseek v3": "```<｜tool▁call▁end｜>",
    "deepseek v3.1": "<｜tool▁call▁end｜>",
    "json": "}]",
}
"""What ends a call of a format, or begins the next one."""


@dataclass(frozen=True)
class Said:
    """A call as the model says it; ``arguments`` is JSON text, or None to leave the key out."""

    name: str
    arguments: str | None


def spell(form: str, calls: Sequence[Said]) -> str:
    """The model's text for the calls."""
    key = "parameters" if form.startswith("llama3") else "arguments"
    objects = [
        f'{{"name": "{call.name}"}}'
        if call.arguments is None
        else f'{{"name": "{call.name}", "{key}": {call.arguments}}}'
        for call in calls
    ]
    match form:
        case "hermes":
            return "\n".join(f"<tool_call>\n{item}\n</tool_call>" for item in objects)
        case "llama3":
            return "; ".join(objects)
        case "llama3 tag":
            return "<|python_tag|>" + "; ".join(objects)
        case "json":
            return f"[{', '.join(objects)}]"
        case "mistral list":
            return f"[TOOL_CALLS] [{', '.join(objects)}]"
        case "mistral":
            return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{call.arguments or '{}'}" for call in calls)
        case "deepseek v3":
            parts = [
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{call.arguments or '{}'}\n```"
                "<｜tool▁call▁end｜>"
                for call in calls
            ]
            return "<｜tool▁calls▁begin｜>" + "\n".join(parts) + "<｜tool▁calls▁end｜>"
    parts = [
        f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{call.arguments or ''}<｜tool▁call▁end｜>"
        for call in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(parts) + "<｜tool▁calls▁end｜>"


def parser(form: str, names: Iterable[str] = FUNCTIONS, most: int | None = None) -> ToolParser:
    return ToolParser(READ[form], CallOutput(frozenset(names), max_calls=most))


def events_of(reader: OutputParser, pieces: Iterable[str]) -> list[Event]:
    events: list[Event] = []
    for piece in pieces:
        events += reader.push(piece)
    return events + reader.finish()


def read(reader: OutputParser, pieces: Iterable[str]) -> Folded:
    """The answer, folded from the events of all pieces."""
    return fold(events_of(reader, pieces))


def shown(answer: Folded) -> tuple[str, str | None, list[tuple[str, str]]]:
    """An answer without its call ids, to compare with others."""
    return answer.content, answer.reasoning, [(call.name, call.arguments) for call in answer.calls]


def cuttings(text: str, pairs: bool = False) -> Iterator[list[str]]:
    """Whole, one character at a time, cut at every position, and at every pair of positions."""
    yield [text]
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    if pairs:
        for first, second in itertools.combinations(range(1, len(text)), 2):
            yield [text[:first], text[first:second], text[second:]]
