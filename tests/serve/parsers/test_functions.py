"""Tools of a request: what is accepted, and what is refused with its reason."""

from typing import Any

import pytest

from jaxinfer.request import FinishReason, RequestError
from serve.parsers.finish import finish_reason
from serve.parsers.functions import read_tool_use

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
G = {"type": "function", "function": {"name": "g"}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("tools", "choice", "parallel", "expected"),
    [
        (None, None, None, ((), "none", True)),
        (None, "none", True, ((), "none", True)),
        (None, "auto", None, ((), "none", True)),
        ([F, G], None, None, (("f", "g"), "auto", True)),
        ([F, G], "auto", False, (("f", "g"), "auto", False)),
        ([F, G], "none", None, (("f", "g"), "none", True)),
        ([F, G], "required", None, (("f", "g"), "required", True)),
        ([F, G], named("g"), None, (("g",), "named", False)),
    ],
)
def test_cht_02_tool_choice(tools: Any, choice: Any, parallel: bool | None, expected: Any) -> None:
    """Tools without ``tool_choice`` mean ``auto``. A named function is called exactly once."""
    use = read_tool_use(tools, choice, parallel)
    assert (tuple(function.name for function in use.functions), use.choice, use.parallel) == expected
    assert use.forced is (use.choice in ("required", "named"))


@pytest.mark.parametrize(
    ("tools", "choice", "param", "message"),
    [
        ([], None, "tools", "non-empty list"),
        ("f", None, "tools", "non-empty list"),
        ([F], named("x"), "tool_choice", "no tool is called 'x'; tools: f"),
        (None, named("x"), "tool_choice", "no tool is called 'x'; tools: none"),
        (None, "required", "tool_choice", "needs tools"),
        ([F], "any", "tool_choice", "allowed: none, auto, required"),
        ([F], 5, "tool_choice", "not known"),
        ([F], {"type": "function"}, "tool_choice", "a function is chosen by"),
        ([F], {"type": "tool", "function": {"name": "f"}}, "tool_choice", "a function is chosen by"),
        ([F, F], None, "tools", "two functions are called 'f'"),
        ([5], None, "tools", r'tools\[0\]\.type: only "function"'),
        ([F, {"type": "web_search"}], None, "tools", r'tools\[1\]\.type: only "function"'),
        ([{"type": "function"}], None, "tools", r"tools\[0\]\.function: an object"),
        ([named("a b")], None, "tools", "1 to 64 letters"),
        ([named("")], None, "tools", "1 to 64 letters"),
        ([named("x" * 65)], None, "tools", "1 to 64 letters"),
        ([named("f\n")], None, "tools", "1 to 64 letters"),
        ([{"type": "function", "function": {}}], None, "tools", "1 to 64 letters"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], None, "tools", "JSON schema"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
            None,
            "tools",
            'must be "object"',
        ),
        ([{"type": "function", "function": {"name": "f", "strict": 1}}], None, "tools", "strict"),
    ],
)
def test_cht_02_tools_that_are_refused(tools: Any, choice: Any, param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        read_tool_use(tools, choice)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("reason", "calls", "named", "expected"),
    [
        (FinishReason.STOP, 0, False, "stop"),
        (FinishReason.STOP, 1, False, "tool_calls"),
        (FinishReason.STOP, 2, False, "tool_calls"),
        (FinishReason.STOP, 1, True, "stop"),
        (FinishReason.LENGTH, 0, False, "length"),
        (FinishReason.LENGTH, 1, False, "length"),
        (FinishReason.REPETITION, 1, False, "repetition"),
        (FinishReason.ABORT, 1, False, "abort"),
        ("stop", 1, False, "tool_calls"),
    ],
)
def test_cht_02_finish_reason(reason: str, calls: int, named: bool, expected: str) -> None:
    """Pinned: a cut answer says so even if it holds a complete call; a named function ends with ``stop``."""
    assert finish_reason(reason, calls, named) == expected
