"""The scanner agrees with ``json`` on what is JSON, and finds the end of a value wherever the text is cut."""

import json
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.parsers.json_scanner import MAX_DEPTH, JsonScanner


def is_json(text: str) -> bool:
    def refuse(name: str) -> NoReturn:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


def scan(pieces: list[str]) -> tuple[JsonScanner, int]:
    """The scanner after all pieces, and how much it read."""
    scanner, count = JsonScanner(), 0
    for piece in pieces:
        end = scanner.feed(piece)
        count += end
        if end < len(piece):
            break
    return scanner, count


@pytest.mark.parametrize(
    "text",
    [
        *("1", "-0", "-", "01", "1.", ".5", "1e5", "1e", "1E+09", "-2.50e-3", "0x1", "+1", "1_000", "--1"),
        *("true", "tru", "nul", "null", "false", "True", "NaN", "Infinity", "-Infinity", "nulll"),
        *('""', '"\\u00e9"', '"\\u00g9"', '"\\x"', '"\n"', '"\\\\"', '"\t"', "'a'", '"\x7f"', '"\\ud83d"'),
        *("[]", "[1]", "[1,]", "[,]", "[1 2]", "[1}", "{]", '{"a"}', '{"a":}', '{"a":1,}', "{,}", "{1:2}"),
        *('{"a":1 "b":2}', "{'a':1}", '{"a" : 1 , "b":[ ] }', "[[[[]]]", "[[[[]]]]", '{"a":{"b":{}}}'),
    ],
)
def test_agrees_with_json(text: str) -> None:
    """A space is added because a number ends only where something else begins."""
    scanner, count = scan([text + " "])
    assert (scanner.done and count >= len(text)) == is_json(text)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=' {}[]",:\\tu0123456789.-+eEnfalsr\n', max_size=24))
def test_agrees_with_json_on_anything(text: str) -> None:
    whole, count = scan([text + " "])
    assert (whole.done and not text[count:].strip(" \t\r\n")) == is_json(text)
    by_character, same = scan(list(text + " "))
    assert (by_character.done, by_character.broken, same) == (whole.done, whole.broken, count)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.text(max_size=6), st.lists(st.text(max_size=6) | st.floats(), max_size=3), max_size=4)
)
def test_a_beginning_is_not_broken_and_not_done(value: dict[str, list[str | float]]) -> None:
    text = json.dumps(value).replace("NaN", "null").replace("Infinity", "1e999")
    for cut in range(len(text)):
        scanner, count = scan([text[:cut]])
        assert not scanner.done
        assert not scanner.broken
        assert count == cut


def test_stops_behind_the_value() -> None:
    text = '{"a": "}"} more'
    scanner, count = scan([text])
    assert scanner.done
    assert text[count:] == " more"


def test_depth_is_bounded() -> None:
    fine, _ = scan(["[" * MAX_DEPTH + "]" * MAX_DEPTH])
    assert fine.done
    deep, _ = scan(["[" * (MAX_DEPTH + 1)])
    assert deep.broken
