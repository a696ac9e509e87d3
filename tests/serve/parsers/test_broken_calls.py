"""What looks like a call and is none."""

import json

import pytest

from serve.parsers.calls import HELD_CHARACTERS
from tests.support.tool_texts import FORMATS, Said, cuttings, parser, read, shown, spell

pytestmark = pytest.mark.feature("tools")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "said",
    [
        Said("unknown", '{"a": 1}'),
        Said("", "{}"),
        Said("f", '{"a": 1,}'),
        Said("f", "{'a': 1}"),
        Said("f", '{"a": NaN}'),
        Said("f", '{"a": "x\ny"}'),
        Said("f", "[1]"),
        Said("f", "5"),
    ],
)
def test_cht_02_what_is_no_call_stays_content(form: str, said: Said) -> None:
    """Unknown functions, broken JSON and arguments that are no object: the text is content, to the letter."""
    text = spell(form, [said])
    for pieces in cuttings(text):
        reader = parser(form)
        assert shown(read(reader, pieces)) == (text, None, [])
        assert reader.num_complete_calls == 0


@pytest.mark.parametrize("form", FORMATS)
def test_cht_02_a_broken_call_does_not_take_a_complete_one_with_it(form: str) -> None:
    """The complete call is a call; the text of the broken one is content."""
    text = spell(form, [Said("f", '{"a": 1}'), Said("g", '{"b": }')])
    for pieces in cuttings(text):
        reader = parser(form)
        answer = read(reader, pieces)
        assert [(call.name, call.arguments) for call in answer.calls] == [("f", '{"a": 1}')]
        assert '{"b": }' in answer.content
        assert reader.num_complete_calls == 1


@pytest.mark.parametrize("form", ["hermes", "deepseek v3", "deepseek v3.1", "mistral"])
def test_cht_02_a_complete_call_after_a_broken_one_is_read(form: str) -> None:
    text = spell(form, [Said("f", '{"a": }'), Said("g", '{"b": 1}')])
    for pieces in cuttings(text):
        answer = read(parser(form), pieces)
        assert [(call.name, call.arguments) for call in answer.calls] == [("g", '{"b": 1}')]


@pytest.mark.parametrize("form", FORMATS)
def test_long_arguments_are_streamed_and_keep_what_the_model_wrote_if_they_break(form: str) -> None:
    """Arguments longer than the part that is held back were given out before they broke; the call stays, not complete,
    and nothing is added to what the model wrote."""
    raw = '{"a": "' + "x" * HELD_CHARACTERS + '", oops'
    text = spell(form, [Said("f", raw + "}")])
    for pieces in ([text], list(text)):
        reader = parser(form)
        answer = read(reader, pieces)
        assert answer.calls[0].arguments.startswith(raw)
        assert text.find(answer.calls[0].arguments) >= 0
        assert reader.num_complete_calls == 0


def test_long_arguments_come_before_their_end() -> None:
    reader = parser("hermes")
    events = reader.push('<tool_call>{"name": "f", "arguments": {"a": "' + "x" * (HELD_CHARACTERS + 50))
    assert len(events) >= 2
    assert len(reader.push("yyyy")) == 1


@pytest.mark.parametrize("tail", ["", "\n", "</tool_call>", "\n</tool_call>", "}</tool_call>"])
def test_a_call_is_complete_with_its_arguments(tail: str) -> None:
    """Models forget the brace of the object around the arguments, or its end mark."""
    for pieces in cuttings('<tool_call>{"name": "f", "arguments": {"a": 1}' + tail):
        reader = parser("hermes")
        assert shown(read(reader, pieces)) == ("", None, [("f", '{"a": 1}')])
        assert reader.num_complete_calls == 1


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', [("f", '{"a": 1}')]),
        ('{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', [("f", '{"a": 1}')]),
        ('{"id": 7, "name": "f", "parameters": {"a": 1}, "type": "function"}', [("f", '{"a": 1}')]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", '{"a": 1}')]),
        ('{"function": "f", "arguments": {}}', [("f", "{}")]),
        ('{"na\\u006de": "\\u0066", "arguments": {}}', [("f", "{}")]),
        ('{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}', [("f", "{}"), ("g", "{}")]),
        ('[{"name": "f", "arguments": {}}, {"name": "g"}]', [("f", "{}"), ("g", "{}")]),
    ],
)
@pytest.mark.parametrize("form", ["hermes", "json", "llama3", "mistral list"])
def test_objects_in_the_ways_that_models_write_them(
    form: str, text: str, calls: list[tuple[str, str]]
) -> None:
    marks = {"hermes": ("<tool_call>", "</tool_call>"), "mistral list": ("[TOOL_CALLS]", "")}
    before, after = marks.get(form, ("", ""))
    for pieces in cuttings(before + text + after):
        assert shown(read(parser(form), pieces)) == ("", None, calls)


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 5}',
        '{"name": "Alice", "age": 3}',
        '{"name": "f", "age": 3}',
        "[1, 2]",
        "[]",
        "{}",
        '{"arguments": {"a": 1}}',
        '{"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\"}", "x": "\\ud83d"}',
        '{"name": "f", "arguments": "nothing"}',
        '{"name": "f", "name": "g"}',
        '{"name": "f"',
        " \n",
        "",
        "plain text with {braces} and [brackets]",
        "Sure: " + json.dumps({"name": "f", "arguments": {}}),
    ],
)
@pytest.mark.parametrize("form", ["json", "llama3"])
def test_answers_that_are_json_stay_answers(form: str, text: str) -> None:
    """In formats without marks an answer that is JSON, but no call, is content; so are calls within a text."""
    for pieces in cuttings(text):
        assert shown(read(parser(form), pieces)) == (text, None, [])


@pytest.mark.parametrize("fence", ["```json\n", "```\n", "```json", " ```"])
@pytest.mark.parametrize("after", ["\n```", "```", "", "\n``", "\n```\nDone."])
def test_generic_calls_may_be_in_a_code_fence(fence: str, after: str) -> None:
    for pieces in cuttings(fence + '{"name": "f", "arguments": {"a": 1}}' + after):
        assert shown(read(parser("json"), pieces)) == (
            "\nDone." if "Done" in after else "",
            None,
            [("f", '{"a": 1}')],
        )


@pytest.mark.parametrize(
    "text", ["```json\n{}\n```", '```\n{"a": 1}\n```', "```python\nx\n```", "``", "```json"]
)
def test_fenced_answers_stay_answers(text: str) -> None:
    for pieces in cuttings(text):
        assert shown(read(parser("json"), pieces)) == (text, None, [])
