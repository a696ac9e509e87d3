"""Grammars that force calls: what they allow is read by the parser of the format, and fits the functions' schemas."""

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxinfer.config import StructuredConfig
from jaxinfer.request import RequestError
from jaxinfer.structured.compiler import GrammarCompiler
from jaxinfer.structured.constraint import Constraint
from jaxinfer.structured.spec import StructuredOutputs
from serve.parsers.base import Folded
from serve.parsers.calls import CallOutput
from serve.parsers.functions import read_tool_use
from serve.parsers.pipeline import HiddenTokens, ToolParser
from serve.parsers.select import ToolFormat, select_tool_format, special_strings
from serve.parsers.tool_grammar import tool_grammar
from tests.support.tokenizers import ByteTokenizer
from tests.support.tool_texts import Said, read, spell

pytestmark = pytest.mark.feature("tools", "structured output")

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "unit": {"enum": ["C", "F"]},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "f": NOTHING}
TEMPLATES = {
    "hermes": "<tool_call>",
    "llama3": "<|python_tag|>",
    "mistral list": "[TOOL_CALLS]",
    "mistral": "[TOOL_CALLS] [ARGS]",
    "deepseek v3": "<｜tool▁call▁begin｜> ```json",
    "deepseek v3.1": "<｜tool▁call▁begin｜>",
    "json": "",
}
MARKS = {"mistral": ("[TOOL_CALLS]", "[ARGS]"), "hermes": ("<tool_call>", "</tool_call>")}


class SpecialTokenizer(ByteTokenizer):
    """BYTE-TOK whose literals are special tokens."""

    def __init__(self, literals: tuple[str, ...]) -> None:
        super().__init__(literals)
        self.special_ids = frozenset({*self.special_ids, *(264 + i for i in range(len(literals)))})


def tools(strict: bool = False) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]


def tool_format(form: str) -> ToolFormat:
    chosen = select_tool_format("auto", {"default": TEMPLATES[form]}, ())
    assert chosen is not None
    return chosen


def grammar(
    form: str,
    tool_choice: Any = "required",
    parallel: bool = True,
    strict: bool = False,
    answer: StructuredOutputs | None = None,
    tokenizer: ByteTokenizer | None = None,
) -> Constraint:
    tokenizer = tokenizer or ByteTokenizer()
    use = read_tool_use(tools(strict), tool_choice, parallel)
    spec = tool_grammar(use, tool_format(form), special_strings(tokenizer), answer)
    assert spec is not None
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (257, 258), StructuredConfig())
    return compiler.compile(spec).start()


def allows(constraint: Constraint, text: str, tokenizer: ByteTokenizer | None = None) -> bool:
    """Whether the text is a whole answer."""
    for token in (tokenizer or ByteTokenizer()).encode(text):
        mask_X = constraint.next_mask()
        if not mask_X[token // 32] >> (token % 32) & 1:
            return False
        assert constraint.accept(token)
    return constraint.may_end


def write(constraint: Constraint, seed: int, tokenizer: ByteTokenizer, most: int = 600) -> str | None:
    """A random answer, of visible characters where there is a choice; None if it did not end."""
    random = np.random.default_rng(seed)
    ids: list[int] = []
    while len(ids) < most:
        mask_X = constraint.next_mask()
        allowed = [i for i in range(tokenizer.vocab_size) if mask_X[i // 32] >> (i % 32) & 1]
        assert allowed
        likely = [i for i in allowed if 32 < i < 127 or i > 255] or allowed
        if constraint.may_end and random.random() < 0.3:
            return tokenizer.decode(ids, skip_special_tokens=False)
        token = int(random.choice(likely))
        if token in (257, 258):
            return tokenizer.decode(ids, skip_special_tokens=False)
        assert constraint.accept(token)
        ids.append(token)
        if constraint.complete:
            return tokenizer.decode(ids, skip_special_tokens=False)
    return None


def parsed(form: str, text: str, hidden: tuple[str, ...] = ()) -> Folded:
    reader = ToolParser(tool_format(form).read, CallOutput(frozenset(SCHEMAS)))
    return read(HiddenTokens(reader, hidden) if hidden else reader, list(text))


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("parallel", [True, False])
def test_cht_02_whatever_required_allows_is_calls_that_fit(form: str, parallel: bool) -> None:
    tokenizer = ByteTokenizer()
    finished = 0
    for seed in range(12):
        text = write(grammar(form, parallel=parallel), seed, tokenizer)
        if text is None:
            continue
        finished += 1
        answer = parsed(form, text)
        assert answer.content == ""
        assert len(answer.calls) >= 1 if parallel else len(answer.calls) == 1
        for call in answer.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert finished >= 6


@pytest.mark.parametrize("form", TEMPLATES)
def test_cht_02_a_named_function_is_called_exactly_once(form: str) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    text = write(grammar(form, choice), 1, ByteTokenizer())
    assert text is not None
    (call,) = parsed(form, text).calls
    assert call.name == "get_weather"
    jsonschema.validate(json.loads(call.arguments), WEATHER)


@pytest.mark.parametrize("form", TEMPLATES)
def test_cht_03_required_allows_the_spelling_of_the_model(form: str) -> None:
    """Several calls unless they are not parallel; no text beside them, no other function, no wrong arguments."""
    weather = Said("get_weather", '{"city": "Oslo", "unit": "C", "place": [1, 2]}')
    space = form == "mistral list"

    def text(*said: Said) -> str:
        return spell(form, said).replace("[TOOL_CALLS] [", "[TOOL_CALLS][" if space else "[TOOL_CALLS] [")

    two = text(weather, Said("f", "{}"))
    assert allows(grammar(form), two)
    assert allows(grammar(form), "\n\n" + two) is (form not in ("llama3", "json"))
    assert not allows(grammar(form, parallel=False), two)
    assert allows(grammar(form, parallel=False), text(weather))
    assert not allows(grammar(form), "Hello. " + text(weather))
    assert not allows(grammar(form), text(Said("g", "{}")))
    assert not allows(grammar(form), text(Said("get_weather", '{"city": "Oslo"}')))


@pytest.mark.parametrize("form", MARKS)
def test_marks_that_are_special_tokens_are_written_as_tokens(form: str) -> None:
    tokenizer = SpecialTokenizer(MARKS[form])
    ids = tokenizer.encode(spell(form, [Said("f", "{}")]))
    assert tokenizer.special_ids & set(ids)
    constraint = grammar(form, tokenizer=tokenizer)
    assert allows(constraint, spell(form, [Said("f", "{}")]), tokenizer)
    text = write(grammar(form, tokenizer=tokenizer), 3, tokenizer)
    assert text is not None
    assert parsed(form, text, ("<|special0|>",)).calls


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", ["hermes", "mistral"])
def test_strict_functions_constrain_calls_and_leave_text_free(form: str, special: bool) -> None:
    tokenizer = SpecialTokenizer(MARKS[form]) if special else ByteTokenizer()

    def fits(text: str, parallel: bool = True) -> bool:
        return allows(grammar(form, "auto", parallel, strict=True, tokenizer=tokenizer), text, tokenizer)

    good = spell(form, [Said("get_weather", '{"city": "Oslo", "unit": "C"}')])
    assert fits("Hello { [ world\n")
    assert fits("")
    assert fits("Wait. " + good)
    assert fits(good + " and " + good)
    assert not fits("Wait. " + spell(form, [Said("get_weather", '{"city": 5}')]))
    assert not fits(good + spell(form, [Said("g", "{}")]))


@pytest.mark.parametrize("form", ["json", "llama3"])
def test_strict_functions_of_formats_without_marks(form: str) -> None:
    """An answer that begins like JSON is a call; any other is free."""

    def fits(text: str) -> bool:
        return allows(grammar(form, "auto", strict=True), text)

    assert fits("Hello {}")
    assert fits("")
    assert fits(spell(form, [Said("get_weather", '{"city": "Oslo", "unit": "C"}')]))
    assert not fits(spell(form, [Said("get_weather", '{"city": 5}')]))


def test_auto_leaves_the_model_free() -> None:
    use = read_tool_use(tools(), "auto")
    assert tool_grammar(use, tool_format("hermes"), {}, None) is None


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (StructuredOutputs(json={"type": "object", "properties": {"a": {"const": 1}}}), '{"a": 1}'),
        (StructuredOutputs(json_object=True), '{"x": [true]}'),
        (StructuredOutputs(choice=("yes", "no")), "yes"),
    ],
)
def test_auto_with_a_form_of_the_answer_allows_either(
    form: str, answer: StructuredOutputs, text: str
) -> None:
    call = spell(form, [Said("f", "{}")]).replace("[TOOL_CALLS] ", "[TOOL_CALLS]")
    assert allows(grammar(form, "auto", answer=answer), text)
    assert allows(grammar(form, "auto", answer=answer), call)
    assert not allows(grammar(form, "auto", answer=answer), "maybe")


def test_a_form_that_cannot_be_joined_with_tools_is_refused() -> None:
    use = read_tool_use(tools(), "auto")
    with pytest.raises(RequestError, match=r"structured_outputs\.regex"):
        tool_grammar(use, tool_format("hermes"), {}, StructuredOutputs(regex="a+"))


def test_a_forced_call_replaces_the_form_of_the_answer() -> None:
    """There is no answer besides the call, so nothing the form could hold for."""
    use = read_tool_use(tools(), "required")
    form = tool_format("hermes")
    with_form = tool_grammar(use, form, {}, StructuredOutputs(regex="a+"))
    assert with_form == tool_grammar(use, form, {}, None)


def test_none_leaves_the_form_of_the_answer() -> None:
    answer = StructuredOutputs(regex="a+")
    assert tool_grammar(read_tool_use(tools(), "none"), tool_format("hermes"), {}, answer) is answer
