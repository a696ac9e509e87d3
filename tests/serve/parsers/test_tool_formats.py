"""Calls in the text of a model: every format, every cutting."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.parsers.base import TextDelta, ToolArgumentsDelta, ToolCallStart
from tests.support.tool_texts import (
    AT_START,
    END_MARKS,
    FORMATS,
    Said,
    cuttings,
    events_of,
    parser,
    read,
    shown,
    spell,
)

pytestmark = pytest.mark.feature("tools")

ARGUMENTS = {
    "wd": 23,
    "sd": 0.8,
    "s": 'ZS}]"x</t',
    "n": {"a": [1, 2]},
    "e": {},
    "u": "é😀",
}
RAW = json.dumps(ARGUMENTS, ensure_ascii=False)


def around(form: str, text: str) -> tuple[str, str]:
    """The text with content before and after the calls, and that content."""
    before = "" if form in AT_START else "One moment: "
    return f"{before}{text} Done.", f"{before} Done."


@pytest.mark.parametrize("form", FORMATS)
def test_cht_01_every_cutting_gives_the_same_call(form: str) -> None:
    """Content around calls is kept to the letter; white space that only separates calls is not content."""
    text, content = around(form, spell(form, [Said("f", RAW)]))
    for pieces in cuttings(text):
        reader = parser(form)
        assert shown(read(reader, pieces)) == (content, None, [("f", RAW)])
        assert reader.num_complete_calls == 1


@pytest.mark.parametrize("form", FORMATS)
def test_cht_01_every_pair_of_cuts_of_a_short_text(form: str) -> None:
    text, content = around(form, spell(form, [Said("g", '{"a": 1}')]))
    for pieces in cuttings(text, pairs=True):
        assert shown(read(parser(form), pieces)) == (content, None, [("g", '{"a": 1}')])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("arguments", ["{}", "{ }", None])
def test_cht_01_calls_without_arguments_have_an_empty_object(form: str, arguments: str | None) -> None:
    text, content = around(form, spell(form, [Said("f", arguments)]))
    for pieces in cuttings(text):
        answer = read(parser(form), pieces)
        assert answer.content == content
        assert [json.loads(call.arguments) for call in answer.calls] == [{}]


@pytest.mark.parametrize("form", ["hermes", "llama3", "llama3 tag", "mistral list", "json"])
def test_cht_01_null_arguments_are_an_empty_object_where_a_key_holds_them(form: str) -> None:
    answer = read(parser(form), [spell(form, [Said("f", "null")])])
    assert shown(answer) == ("", None, [("f", "{}")])


@pytest.mark.parametrize("form", FORMATS)
def test_cht_01_a_value_may_contain_the_end_mark(form: str) -> None:
    arguments = {"s": f"a{END_MARKS[form]}b", "t": "\\" + END_MARKS[form]}
    raw = json.dumps(arguments, ensure_ascii=False)
    text, content = around(form, spell(form, [Said("f", raw), Said("g", "{}")]))
    for pieces in cuttings(text):
        answer = read(parser(form), pieces)
        assert shown(answer) == (content, None, [("f", raw), ("g", "{}")])
        assert json.loads(answer.calls[0].arguments) == arguments


@pytest.mark.parametrize("form", FORMATS)
def test_cht_01_the_name_comes_once_and_arguments_are_never_empty(form: str) -> None:
    text = spell(form, [Said("f", RAW), Said("g", "{}")])
    for pieces in cuttings(text):
        events = events_of(parser(form), pieces)
        starts = [event for event in events if isinstance(event, ToolCallStart)]
        assert [(start.index, start.name) for start in starts] == [(0, "f"), (1, "g")]
        for index in (0, 1):
            parts = [e.text for e in events if isinstance(e, ToolArgumentsDelta) and e.index == index]
            assert "".join(parts)
        assert not any(isinstance(event, TextDelta) for event in events)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("long", [False, True])
def test_cht_01_a_cut_call_has_no_invented_brackets(form: str, long: bool) -> None:
    """A call that is cut before its arguments begin stays content; after that it is a call whose arguments are the
    beginning of what the model would have written. It is not complete."""
    raw = json.dumps({**ARGUMENTS, "long": "x" * 300} if long else ARGUMENTS, ensure_ascii=False)
    text = spell(form, [Said("f", raw)])
    end = text.index(raw) + len(raw)
    for cut in range(len(text)):
        reader = parser(form)
        answer = read(reader, [text[:cut]])
        if cut <= text.index(raw):
            assert shown(answer) == (text[:cut], None, [])
        elif cut < end:
            assert shown(answer) == ("", None, [("f", text[text.index(raw) : cut])])
        else:
            assert [(call.name, call.arguments) for call in answer.calls] == [("f", raw)]
        assert reader.num_complete_calls == (cut >= end)
        assert shown(read(parser(form), list(text[:cut]))) == shown(answer)


@pytest.mark.parametrize("form", FORMATS)
def test_cht_03_indices_count_and_ids_are_unique(form: str) -> None:
    said = [Said("get_weather", '{"city": "Oslo"}'), Said("f", "{}"), Said("get_weather", '{"city": "Rome"}')]
    text, content = around(form, spell(form, said))
    for pieces in cuttings(text):
        events = events_of(parser(form), pieces)
        starts = [event for event in events if isinstance(event, ToolCallStart)]
        assert [start.index for start in starts] == [0, 1, 2]
        assert len({start.id for start in starts}) == 3
        answer = read(parser(form), pieces)
        assert shown(answer) == (content, None, [(call.name, call.arguments) for call in said])


@pytest.mark.parametrize("form", FORMATS)
def test_cht_03_at_most_one_call_if_they_are_not_parallel(form: str) -> None:
    """Further calls are left out: they are neither calls nor content."""
    text = spell(form, [Said("f", RAW), Said("g", '{"a": 2}'), Said("f", "{}")])
    for pieces in cuttings(text):
        reader = parser(form, most=1)
        assert shown(read(reader, pieces)) == ("", None, [("f", RAW)])
        assert reader.num_complete_calls == 1


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_SAID = st.builds(
    lambda name, arguments, ascii_only, indent: Said(
        name, json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    ),
    st.sampled_from(["f", "g"]),
    st.dictionaries(st.text(), _JSON, max_size=4),
    st.booleans(),
    st.sampled_from([None, 1]),
)


def _cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=60, deadline=None)
@given(said=st.lists(_SAID, min_size=1, max_size=3), places=st.lists(st.integers(0, 10**6), max_size=12))
def test_cht_01_any_calls_in_any_cutting(form: str, said: list[Said], places: list[int]) -> None:
    text = spell(form, said)
    answer = read(parser(form), _cut(text, places))
    assert shown(answer) == ("", None, [(call.name, call.arguments) for call in said])


_FRAGMENTS = st.sampled_from(
    [
        *END_MARKS.values(),
        *('{"name": "f", ', '"arguments": ', '{"a": 1}', '"name": "g"', "null", "f", "x", '"'),
        *("}", "]", "[", " ", "\n", ", ", ";", "<tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "```json"),
        "<｜tool▁calls▁end｜>",
    ]
)


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=200, deadline=None)
@given(parts=st.lists(_FRAGMENTS, max_size=14), places=st.lists(st.integers(0, 10**6), max_size=6))
def test_cht_01_broken_texts_do_not_depend_on_the_cutting(
    form: str, parts: list[str], places: list[int]
) -> None:
    text = "".join(parts)
    whole, counted = parser(form), parser(form)
    expected = shown(read(whole, [text]))
    assert shown(read(parser(form), list(text))) == expected
    assert shown(read(counted, _cut(text, places))) == expected
    assert counted.num_complete_calls == whole.num_complete_calls
    for _, arguments in expected[2][: whole.num_complete_calls]:
        assert arguments
    if not expected[2]:
        assert expected[0] == text
