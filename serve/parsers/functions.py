"""The tools of a request, checked: which functions there are, and whether the model may or must call them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxinfer.request import RequestError

NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,64}")
"""Names of functions. OpenAI's rule allows no dots and colons; servers of many tools use both."""
CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class Function:
    """Attributes:
    parameters: JSON schema of the arguments; None: any object.
    strict: arguments are constrained to the schema whenever the model calls the function.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True)
class ToolUse:
    """Attributes:
    functions: what may be called; with ``named`` only that function.
    choice: ``none`` and ``auto`` leave the model free; ``required`` and ``named`` force a call.
    parallel: whether there may be more than one call.
    """

    functions: tuple[Function, ...] = ()
    choice: Literal["none", "auto", "required", "named"] = "none"
    parallel: bool = True

    @property
    def forced(self) -> bool:
        return self.choice in ("required", "named")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)


def read_tool_use(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    parallel_tool_calls: bool | None = True,
) -> ToolUse:
    """The tools of a chat request.

    Args:
        tools: ``{"type": "function", "function": {"name", "parameters", "strict"}}`` each; None: no tools.
        tool_choice: a word, or ``{"type": "function", "function": {"name": ...}}``; None is ``auto`` if there are
            tools. A named function is called exactly once.
        parallel_tool_calls: False: at most one call; None is True.

    Raises:
        RequestError: names the field that is wrong, and what is allowed.
    """
    functions = _read_functions(tools)
    named = _read_name(tool_choice)
    parallel = parallel_tool_calls is not False
    if named is not None:
        chosen = tuple(function for function in functions if function.name == named)
        if not chosen:
            known = ", ".join(function.name for function in functions) or "none are given"
            raise RequestError(f"tool_choice: no tool is called {named!r}; tools: {known}", "tool_choice")
        return ToolUse(chosen, "named", False)
    match tool_choice:
        case "required" if not functions:
            raise RequestError("tool_choice: 'required' needs tools", "tool_choice")
        case "required":
            return ToolUse(functions, "required", parallel)
        case "none":
            return ToolUse(functions, "none", parallel)
        case None | "auto":
            return ToolUse(functions, "auto" if functions else "none", parallel)
    raise RequestError(
        f"tool_choice: {tool_choice!r:.80} is not known; allowed: {', '.join(CHOICES)}, or a function",
        "tool_choice",
    )


def _read_name(tool_choice: object) -> str | None:
    if not isinstance(tool_choice, Mapping):
        return None
    function = tool_choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if tool_choice.get("type") != "function" or not isinstance(name, str):
        raise RequestError(
            'tool_choice: a function is chosen by {"type": "function", "function": {"name": "..."}}',
            "tool_choice",
        )
    return name


def _read_functions(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Function, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise RequestError(
            "tools: a non-empty list is needed; leave the field out if there are none", "tools"
        )
    functions = tuple(_read_function(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    seen: set[str] = set()
    for function in functions:
        if function.name in seen:
            raise RequestError(f"tools: two functions are called {function.name!r}", "tools")
        seen.add(function.name)
    return functions


def _read_function(tool: object, where: str) -> Function:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise RequestError(f'{where}.type: only "function" tools are known', "tools")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function: an object is needed", "tools")
    name = function.get("name")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise RequestError(
            f"{where}.function.name: 1 to 64 letters, digits, '_', '-', '.' or ':' are needed, not {name!r:.80}",
            "tools",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(f"{where}.function.parameters: a JSON schema (an object) is needed", "tools")
    if parameters and parameters.get("type", "object") != "object":
        raise RequestError(f'{where}.function.parameters.type: must be "object"', "tools")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{where}.function.strict: true or false is needed", "tools")
    return Function(name, parameters or None, bool(strict))
