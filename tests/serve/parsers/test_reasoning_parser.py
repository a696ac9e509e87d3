"""Reasoning, then content and calls."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.tokenization.detokenizer import IncrementalDetokenizer
from serve.parsers.base import Folded
from serve.parsers.pipeline import HiddenTokens, PlainParser, ReasoningParser
from tests.support.tokenizers import ByteTokenizer
from tests.support.tool_texts import Said, cuttings, parser, read, shown, spell

pytestmark = pytest.mark.feature("reasoning")


def split(pieces: list[str], inside: bool = False) -> Folded:
    return read(ReasoningParser(PlainParser(), inside), pieces)


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\na b\n</think>\n\nc d", False, "a b", "c d"),
        ("\n<think>a</think>b", False, "a", "b"),
        ("a b</think>\nc", True, "a b", "c"),
        ("<think>a</think>c", True, "a", "c"),
        ("<think>\n\n</think>\n\nc", False, None, "c"),
        ("</think>c", True, None, "c"),
        ("c <think>x</think>", False, None, "c <think>x</think>"),
        ("  c", False, None, "  c"),
        ("<think>a <b </thin </think >  ", False, "a <b </thin </think >", ""),
        ("a b", True, "a b", ""),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("<thin", False, None, "<thin"),
        ("", False, None, ""),
        ("", True, None, ""),
    ],
)
def test_every_cutting_splits_the_same(text: str, inside: bool, reasoning: str | None, content: str) -> None:
    """White space around the reasoning belongs to its tags. A text that does not begin with the start tag has no
    reasoning, unless the prompt opened it; reasoning that does not end is all reasoning."""
    for pieces in cuttings(text, pairs=True):
        assert shown(split(pieces, inside)) == (content, reasoning, [])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "think>", "a", " ", "\n", "</"]), max_size=10),
    st.booleans(),
)
def test_any_text_in_any_cutting(parts: list[str], inside: bool) -> None:
    text = "".join(parts)
    assert shown(split(list(text), inside)) == shown(split([text], inside)) == shown(split(parts, inside))


@pytest.mark.parametrize("form", ["hermes", "mistral", "deepseek v3.1", "json", "llama3"])
@pytest.mark.feature("tools")
def test_cht_01_calls_are_read_after_the_reasoning_and_not_in_it(form: str) -> None:
    thought = spell(form, [Said("f", '{"in": "thought"}')])
    text = f"<think>I could say {thought}</think>\n\n" + spell(form, [Said("g", '{"a": 1}')])
    for pieces in cuttings(text):
        answer = read(ReasoningParser(parser(form), inside=False), pieces)
        assert shown(answer) == ("", f"I could say {thought}", [("g", '{"a": 1}')])


@pytest.mark.feature("tools")
def test_det_03_bytes_that_are_no_text_do_not_hide_the_call_after_them() -> None:
    """The broken character is U+FFFD in the reasoning; the call is complete."""
    tokenizer = ByteTokenizer()
    ids = [*b"<think>", 0xE6, 0x80, 0x3D, *b"</think>", *spell("hermes", [Said("f", '{"a": "x"}')]).encode()]
    for size in (1, 2, 3, 7, len(ids)):
        detokenizer = IncrementalDetokenizer(tokenizer, (1, 2, 3))
        texts = [detokenizer.append(tuple(ids[i : i + size])) for i in range(0, len(ids), size)]
        reader = ReasoningParser(parser("hermes"), inside=False)
        answer = read(reader, [*texts, detokenizer.finish()])
        assert shown(answer) == ("", "\ufffd=", [("f", '{"a": "x"}')])
        assert reader.num_complete_calls == 1


@pytest.mark.parametrize("cut", range(4))
def test_det_03_a_cut_character_leaves_a_complete_call_intact(cut: int) -> None:
    tokenizer = ByteTokenizer()
    text = spell("hermes", [Said("f", "{}")]) + "ok "
    ids = [*text.encode(), *"😀".encode()[:cut]]
    detokenizer = IncrementalDetokenizer(tokenizer, (1,))
    reader = parser("hermes")
    answer = read(reader, [*(detokenizer.append((i,)) for i in ids), detokenizer.finish()])
    assert answer.content.startswith("ok ")
    assert [(call.name, call.arguments) for call in answer.calls] == [("f", "{}")]
    answer.content.encode()


def test_special_tokens_that_are_no_marks_are_hidden() -> None:
    text = "a<|x|>b" + spell("mistral", [Said("f", '{"a": 1}')]) + "<|eot|>"
    for pieces in cuttings(text):
        answer = read(HiddenTokens(parser("mistral"), ("<|x|>", "<|eot|>")), pieces)
        assert shown(answer) == ("ab", None, [("f", '{"a": 1}')])


_PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<|x|>", "<|", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": '),
        *("{}}", "{", " ", "\n", "a", '"', '{"a": "<think>"}}', "[", "]"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_PIECES, max_size=12), st.booleans())
def test_any_text_through_all_parsers_in_any_cutting(parts: list[str], inside: bool) -> None:
    def answer(pieces: list[str]) -> object:
        inner = parser("hermes")
        reader = HiddenTokens(ReasoningParser(inner, inside), ("<|x|>", "<|yy|>"))
        return shown(read(reader, pieces)), reader.num_complete_calls

    text = "".join(parts)
    assert answer(list(text)) == answer([text]) == answer(parts)
