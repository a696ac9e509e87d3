"""What form an answer must have: names and limits, checked when the object is made."""

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.param_checks import Checks, InvalidParamsError, Problem

FIELD = "structured_outputs"
MAX_SCHEMA_DEPTH = 64
"""Levels of nested objects and arrays of a schema."""
MAX_SCHEMA_NODES = 50_000
MAX_TEXT = 2**20
"""Characters of any text; the engine's own limit (``structured.max_grammar_bytes``) is lower as a rule."""
MAX_CHOICES = 4096

Schema = Mapping[str, Any] | str | bool


@dataclass(frozen=True)
class StructuredOutputs:
    """The form of an answer; exactly one of the first six fields is given. Names as in vLLM.

    A schema that is given as an object is kept as its JSON text, so that equal specs compare and hash equal and cross
    process borders unchanged.

    Attributes:
        json: a JSON schema, as an object or as JSON text.
        regex: an expression that the whole answer matches; no look-around, no back-references.
        choice: the answer is one of these texts.
        grammar: a context-free grammar in Lark or GBNF (EBNF) form with the rule ``start`` or ``root``.
        json_object: True: any JSON object.
        structural_tag: free text with constrained parts: ``{"structures": [{"begin", "schema", "end"}, ...],
            "triggers": [...]}``, as an object or as JSON text.
        disable_any_whitespace: JSON without optional whitespace, which is shorter and lets more tokens be forced.
        whitespace_pattern: expression of the whitespace between JSON tokens.
        after_reasoning: the form holds for what follows ``</think>``; the text before it is free.

    Raises:
        InvalidParamsError: lists every problem, with field names below ``structured_outputs``.
    """

    json: Schema | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    after_reasoning: bool = False

    def __post_init__(self) -> None:
        checks = Checks()
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            shown = f"given with {', '.join(given)}" if given else "empty"
            checks.problems.append(Problem(FIELD, shown, f"exactly one of {', '.join(_KINDS)}"))
        normal = {
            "json": None if self.json is None else _schema_text("json", self.json, checks),
            "choice": None if self.choice is None else _choice(self.choice, checks),
            "structural_tag": None
            if self.structural_tag is None
            else _schema_text("structural_tag", self.structural_tag, checks),
        }
        _check_text("regex", self.regex, checks)
        _check_text("grammar", self.grammar, checks)
        _check_text("whitespace_pattern", self.whitespace_pattern, checks)
        if self.json_object not in (None, True):
            checks.fail(f"{FIELD}.json_object", self.json_object, "True, or None")
        checks.flag(f"{FIELD}.disable_any_whitespace", self.disable_any_whitespace)
        checks.flag(f"{FIELD}.after_reasoning", self.after_reasoning)
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            checks.fail(
                f"{FIELD}.whitespace_pattern", self.whitespace_pattern, "None with disable_any_whitespace"
            )
        checks.raise_if_any()
        for name, value in normal.items():
            object.__setattr__(self, name, value)

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in _KINDS if getattr(self, name) is not None)


_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def read_structured_outputs(given: Any, checks: Checks) -> StructuredOutputs | None:
    """A spec from what a user passed: the object, a mapping of its fields, or None."""
    if given is None or isinstance(given, StructuredOutputs):
        return given
    if not isinstance(given, Mapping):
        checks.fail(FIELD, given, "StructuredOutputs, a mapping of its fields, or None")
        return None
    unknown = set(map(str, given)) - set(StructuredOutputs.__dataclass_fields__)
    if unknown:
        checks.fail(FIELD, sorted(unknown), f"the fields {', '.join(StructuredOutputs.__dataclass_fields__)}")
        return None
    try:
        return StructuredOutputs(**given)
    except InvalidParamsError as error:
        checks.problems += error.problems
        return None


def _schema_text(name: str, given: Any, checks: Checks) -> str | None:
    """JSON text of a schema, with its characters unescaped: whoever escaped them meant the same schema."""
    field, allowed = f"{FIELD}.{name}", "a JSON object or its text"
    value = given
    if isinstance(given, str):
        if len(given) > MAX_TEXT:
            checks.fail(field, given, f"at most {MAX_TEXT} characters")
            return None
        try:
            value = json_module.loads(given, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            checks.fail(field, given, f"{allowed} ({type(error).__name__}: {str(error)[:80]})")
            return None
    plain = isinstance(value, bool) and name == "json"
    if not plain and (not isinstance(value, Mapping) or (not value and name != "json")):
        checks.fail(field, given, allowed)
        return None
    if not _is_shallow(value):
        checks.fail(field, given, f"at most {MAX_SCHEMA_DEPTH} nested levels and {MAX_SCHEMA_NODES} values")
        return None
    try:
        text = json_module.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text
    except (TypeError, ValueError) as error:
        checks.fail(field, given, f"{allowed} ({error})")
        return None


def _is_shallow(value: Any) -> bool:
    """Whether a value is nested at most as deep, and has at most as many parts, as allowed; without recursion."""
    level, seen = [value], 0
    for _ in range(MAX_SCHEMA_DEPTH):
        seen += len(level)
        if seen > MAX_SCHEMA_NODES:
            return False
        level = [
            child
            for item in level
            if isinstance(item, Mapping | list | tuple)
            for child in (item.values() if isinstance(item, Mapping) else item)
        ]
        if not level:
            return True
    return not any(isinstance(item, Mapping | list | tuple) for item in level)


def _choice(given: Any, checks: Checks) -> tuple[str, ...]:
    field = f"{FIELD}.choice"
    items = checks.sized(field, given, "strings", 1, MAX_CHOICES)
    for i, item in enumerate(items):
        if not isinstance(item, str) or not item or not _is_unicode(item):
            checks.fail(f"{field}[{i}]", item, "a string that is not empty, without lone surrogates")
            return ()
    return tuple(dict.fromkeys(items))


def _check_text(name: str, value: Any, checks: Checks) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value.strip():
        checks.fail(f"{FIELD}.{name}", value, "a string that is not empty")
    elif len(value) > MAX_TEXT or "\0" in value or not _is_unicode(value):
        checks.fail(
            f"{FIELD}.{name}", value, f"at most {MAX_TEXT} characters without NUL and without lone surrogates"
        )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
