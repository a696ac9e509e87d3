"""Stop strings over token borders, and the cut of text and tokens at the same place."""

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.tokenization.output import OutputText, TextRules
from jaxinfer.tokenization.stop import StopMatcher
from tests.support.tokenizers import ByteTokenizer, SpmTokenizer

LETTERS = st.text("abc", max_size=30)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(borders)]


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    text, stop = "", None
    for piece in pieces:
        given_out, stop = matcher.feed(piece)
        text += given_out
        if stop is not None:
            break
    return text + matcher.flush(), stop


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The first end of a match, and there the longest: found the slow way."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    LETTERS,
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 30)),
    st.booleans(),
)
def test_any_cutting_gives_the_same_result(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    """Pinned: the match that ends first wins; of those that end together, the longest."""
    matcher = StopMatcher(stops, include)
    assert run(matcher, pieces_of(text, cuts)) == reference(text, stops, include)
    if matcher.stop is not None:
        assert text[matcher.match_begin : matcher.match_end] == matcher.stop


@given(LETTERS, st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4))
def test_holds_back_exactly_a_possible_beginning(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    matcher.feed(text)
    if matcher.stop is None:
        ends = [text[start:] for start in range(len(text) + 1)]
        assert matcher.held == next(end for end in ends if any(stop.startswith(end) for stop in stops))


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("aENDb") == ("a", "END")
    assert matcher.feed("c") == ("", "END")
    assert matcher.skip("c") == ""
    assert matcher.flush() == ""


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopMatcher([]).feed("abc") == ("abc", None)


def test_empty_stop_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_many_long_stop_strings_take_linear_time() -> None:
    stops = ["a" * 2000 + chr(0x4E00 + index) for index in range(20)]
    start = time.perf_counter()
    matcher = StopMatcher(stops)
    for _ in range(1000):
        matcher.feed("a" * 100)
    assert time.perf_counter() - start < 2.0  # comparing at each character takes 4e9 steps
    assert len(matcher.held) == 2000


def output(script: list[str], rules: TextRules, step: int) -> tuple[str, list[int], str | None, list[int]]:
    """Text, kept ids, stop string, and how many tokens were out after each push."""
    tokenizer = ByteTokenizer(("a", " b", " ha", " c", "hah", "!"))
    ids = [
        tokenizer.id_of(token) if len(token) > 1 else 264 + ["a", "!"].index(token) * 5 for token in script
    ]
    result = OutputText(tokenizer, [*b"Hi"], rules)
    text, counts = "", []
    for start in range(0, len(ids), step):
        delta = result.push(ids[start : start + step])
        text += delta.text
        counts.append(delta.num_tokens)
        assert len(text) >= (result.token_starts[delta.num_tokens - 1] if delta.num_tokens else 0)
        if delta.stop is not None:
            break
    delta = result.finish()
    assert counts == sorted(counts)
    assert delta.num_tokens >= max(counts, default=0)
    return text + delta.text, ids[: delta.num_tokens], delta.stop, counts


@pytest.mark.parametrize("step", [1, 2, 4, 7])
@pytest.mark.parametrize("include", [False, True])
def test_lpb_05_text_and_tokens_are_cut_together(step: int, include: bool) -> None:
    """Pinned: tokens that begin at or after the cut are dropped; with include_stop the cut is the match's
    end.
    """
    rules = TextRules(stop_strings=(" ha ha",), include_stop=include)
    text, ids, stop, _ = output(["a", " b", " ha", " ha", " ha", " c"], rules, step)
    assert stop == " ha ha"
    assert text == ("a b ha ha" if include else "a b")
    assert ids == ([264, 265, 266, 266] if include else [264, 265])


@pytest.mark.parametrize("step", [1, 3])
def test_lpb_05_stop_string_inside_a_token(step: int) -> None:
    rules = TextRules(stop_strings=("a!",))
    text, ids, stop, _ = output(["a", "hah", " b"], rules, step)
    assert (text, len(ids), stop) == ("ahah b", 3, None)
    text, ids, stop, _ = output(["hah", " ha", "!", " c"], rules, step)
    assert (text, len(ids), stop) == ("hah h", 2, "a!")  # ' ha' begins before the stop and stays, in part


def test_lpb_05_tokens_wait_for_their_text() -> None:
    _, ids, stop, counts = output(
        ["a", " ha", " b", " ha", " ha"], TextRules(stop_strings=(" ha ha",)), step=1
    )
    assert stop == " ha ha"
    assert counts == [1, 1, 3, 3, 3]
    assert len(ids) == 3


@pytest.mark.parametrize("step", [1, 2, 6])
def test_stop_strings_do_not_count_in_the_first_min_tokens(step: int) -> None:
    """Pinned: a match has to begin after the text of the first min_tokens tokens."""
    script = ["a", " ha", " ha", " b", " ha", " ha", " c"]
    for min_tokens, kept in ((0, 1), (1, 1), (2, 4), (3, 4), (4, 4), (5, 7)):
        rules = TextRules(stop_strings=(" ha ha",), min_tokens=min_tokens)
        text, ids, stop, _ = output(script, rules, step)
        assert (len(ids), stop) == (kept, None if kept == 7 else " ha ha"), min_tokens
        assert text == "".join(script[:kept])
        assert len(ids) >= min_tokens


def test_stop_string_over_broken_bytes_and_spaces() -> None:
    tokenizer = SpmTokenizer(("_a", "_b"))
    result = OutputText(tokenizer, tokenizer.ids(["_a"]), TextRules(stop_strings=("€ b",)))
    assert result.push(tokenizer.ids(["_a", *"€".encode()])).text == " a"
    delta = result.push(tokenizer.ids(["_b", "_a"]))
    assert (delta.text, delta.num_tokens, delta.stop) == ("", 1, "€ b")


def test_finish_gives_out_what_was_held_back() -> None:
    tokenizer = ByteTokenizer()
    result = OutputText(tokenizer, [], TextRules(stop_strings=("END", "\ufffd!")))
    assert result.push([*b"xEN", 0xE2]).text == "x"
    delta = result.finish()
    assert (delta.text, delta.num_tokens, delta.stop) == ("EN\ufffd", 4, None)
