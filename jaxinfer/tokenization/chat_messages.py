"""Chat messages as clients send them, brought into the form that chat templates expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = ("text", "input_text", "output_text")


class ChatTemplateError(ValueError):
    """A conversation that cannot be rendered: malformed, or refused by the template."""


class ToolArguments(dict[str, Any]):
    """Arguments of a past tool call for a template.

    Clients send a JSON text. Templates iterate over a mapping, print it with ``tojson``, or put it into the
    prompt as if it were that text; this is a mapping that is the JSON text wherever a string is needed.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: object) -> str:
        return str(self) + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + str(self) if isinstance(other, str) else NotImplemented


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checks messages and returns copies for a template.

    Contents are strings, or lists of ``{"type": "text", "text": ...}``. Absent or null content is an empty
    string, other null fields are left out. Arguments of tool calls become ``ToolArguments``; empty ones are
    no arguments. Reasoning text is found under ``reasoning_content``, ``reasoning`` and ``thinking``,
    whichever the client used.

    Raises:
        ChatTemplateError: naming the message and what is wrong with it.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise ChatTemplateError("messages: a non-empty list of messages is needed")
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def join_parts(parts: Sequence[Mapping[str, Any]]) -> str:
    """Text parts as one string for templates that expect a string, each on a line of its own."""
    return "\n".join(part["text"] for part in parts)


def parse_arguments(arguments: object, where: str) -> ToolArguments:
    """Arguments of a tool call from a JSON text or a mapping; order and characters are kept.

    Raises:
        ChatTemplateError: not a JSON object.
    """
    if arguments is None or arguments == "":
        return ToolArguments()
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ChatTemplateError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(arguments, Mapping):
        raise ChatTemplateError(f"{where}: a JSON object is needed, this is {_json_type(arguments)}")
    return ToolArguments(arguments)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _json_type(value: object) -> str:
    names = {
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "null" if value is None else type(value).__name__)


def _normalize(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where}: an object is needed, this is {_json_type(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatTemplateError(f"{where}.role: a non-empty string is needed")
    result = {key: value for key, value in message.items() if value is not None}
    result["content"] = _normalize_content(message.get("content"), f"{where}.content")
    calls = result.pop("tool_calls", None)
    if calls:
        result["tool_calls"] = _normalize_calls(calls, f"{where}.tool_calls")
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise ChatTemplateError(f"{where}: reasoning text is {_json_type(reasoning)}, a string is needed")
        result.update(dict.fromkeys(_REASONING_KEYS, reasoning))
    return result


def _normalize_content(content: object, where: str) -> str | list[dict[str, str]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ChatTemplateError(
            f"{where}: a string or a list of parts is needed, this is {_json_type(content)}"
        )
    return [_normalize_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _normalize_part(part: object, where: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise ChatTemplateError(f"{where}: a content part is an object, this is {_json_type(part)}")
    kind = part.get("type")
    if kind == "refusal":
        text = part.get("refusal")
    elif kind in _TEXT_PARTS:
        text = part.get("text")
    else:
        raise ChatTemplateError(f"{where}.type: {kind!r} is not supported by this model; supported: text")
    if not isinstance(text, str):
        raise ChatTemplateError(f"{where}.text: a string is needed, this is {_json_type(text)}")
    return {"type": "text", "text": text}


def _normalize_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise ChatTemplateError(f"{where}: a list is needed, this is {_json_type(calls)}")
    result = []
    for index, call in enumerate(calls):
        here = f"{where}[{index}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ChatTemplateError(f"{here}.function.name: a string is needed")
        arguments = parse_arguments(function.get("arguments"), f"{here}.function.arguments")
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result
