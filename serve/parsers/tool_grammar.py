"""Grammars that make a model call functions, in the format that its parser reads."""

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxinfer.request import RequestError
from jaxinfer.structured.spec import StructuredOutputs
from serve.parsers.functions import ToolUse
from serve.parsers.select import CallForm, ToolFormat

WHITESPACE = " "
"""Between JSON tokens, if any: as models are trained to write calls. A weak model would write more for ever."""
_JSON_OPTIONS = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
}


def tool_grammar(
    use: ToolUse, form: ToolFormat, special: Mapping[str, int], answer: StructuredOutputs | None
) -> StructuredOutputs | None:
    """What the answer must look like, given the tools.

    With ``required`` or a named function it is one call or more, whose arguments fit the function's schema. With
    ``auto`` it is free, unless a function is strict, or the answer has a form of its own: then it may be calls instead.

    Args:
        special: ids of special tokens by text; marks of the format may be among them.
        answer: the form that the request asks for; of no effect if a call is forced.

    Raises:
        RequestError: the form cannot be joined with tools.
    """
    if use.choice == "none":
        return answer
    rules = _Rules(use, form.form, special)
    if use.forced:
        # Models that reason begin their answer with empty lines.
        start = r"start: /\n{1,2}/? calls" if form.form.mark else "start: calls"
        return StructuredOutputs(grammar=_text(start, *rules.calls()))
    if answer is not None:
        return StructuredOutputs(grammar=_text("start: calls | answer", *rules.calls(), _answer(answer)))
    if any(function.strict for function in use.functions):
        return StructuredOutputs(grammar=_text(*rules.text_and_calls()))
    return None


def _text(*rules: str) -> str:
    return "\n".join(["%llguidance {}", *rules])


class _Rules:
    """Lark rules, as llguidance reads them."""

    def __init__(self, use: ToolUse, form: CallForm, special: Mapping[str, int]) -> None:
        self._use = use
        self._form = form
        self._special = special

    def calls(self) -> list[str]:
        """The rule ``calls``: a whole answer."""
        form = self._form
        return [self._sequence("calls", form.opening), *self._call("call", form.before)]

    def text_and_calls(self) -> list[str]:
        """The rule ``start``: any text, in which the mark of calls begins a call that fits."""
        form = self._form
        mark = form.mark
        if not mark:  # calls are whole answers, known by how they begin
            return ["start: calls | TEXT", r"TEXT: /([^ \t\r\n{\[](.|\n)*)?/", *self.calls()]
        if form.opening:
            body = [self._sequence("body", form.opening.removeprefix(mark)), *self._call("call", form.before)]
        else:
            body = self._call("body", form.before.removeprefix(mark))
        times = "*" if self._use.parallel else "?"
        if mark in self._special:
            opened = f"opened: TEXT {self._literal(mark)}"
        else:  # lazy: it ends at the first mark, so free text cannot have one
            opened = f"opened[lazy]: /(.|\\n)*/ {self._literal(mark)}"
        return [f"start: (opened body){times} tail", "tail: TEXT", r"TEXT: /(.|\n)*/", opened, *body]

    def _sequence(self, name: str, opening: str) -> str:
        form = self._form
        more = [f"({self._literal(form.separator)} call)*"] if self._use.parallel else []
        return " ".join([f"{name}:", self._literal(opening), "call", *more, self._literal(form.closing)])

    def _call(self, name: str, before: str) -> list[str]:
        functions = self._use.functions
        names = [f"call_{i}" for i in range(len(functions))]
        rules = [f"{name}: {' | '.join(names)}"]
        for rule, function in zip(names, functions, strict=True):
            begin = self._literal(before + function.name + self._form.between)
            whole = self._use.forced or function.strict
            schema = _schema(function.parameters if whole else None)
            rules.append(f"{rule}: {begin} %json {schema} {self._literal(self._form.after)}")
        return rules

    def _literal(self, text: str) -> str:
        """Strings and special tokens that spell a text."""
        # Where a JSON answer is possible too, both must be lexed alike: the lexer cannot go back.
        parts = [text] if self._form.mark else re.findall(r'"[^"]*"|[^"]', text)
        marks = "|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or "(?!)"
        pieces = [piece for part in parts for piece in re.split(f"({marks})", part) if piece]
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
        )


def _schema(parameters: Mapping[str, Any] | None) -> str:
    schema = {"type": "object", **(parameters or {}), "x-guidance": _JSON_OPTIONS}
    return json.dumps(schema, ensure_ascii=False)


def _answer(answer: StructuredOutputs) -> str:
    if answer.json is not None or answer.json_object:
        schema: Any = {"type": "object"} if answer.json is None else json.loads(str(answer.json))
        if isinstance(schema, dict):
            schema = {**schema, "x-guidance": _JSON_OPTIONS}
        return f"answer: %json {json.dumps(schema, ensure_ascii=False)}"
    if answer.choice is not None:
        return "answer: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in answer.choice)
    raise RequestError(
        f"structured_outputs.{answer.kind}: cannot be joined with tools; allowed with tool_choice 'auto': json, "
        "json_object, choice",
        "structured_outputs",
    )
