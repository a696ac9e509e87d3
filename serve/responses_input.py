"""``/v1/responses`` as a chat request: input items become messages, and flat tools and formats nested ones."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.request import RequestError
from serve.protocol.chat import ChatRequest
from serve.protocol.common import SamplingFields
from serve.protocol.responses import ResponsesRequest

_ROLES = ("user", "assistant", "system", "developer")
_PARTS = ("input_text", "output_text", "text", "refusal")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_TAKEN_OVER = {*SamplingFields.model_fields, "parallel_tool_calls", "chat_template_kwargs", "stream"}
"""Fields that mean the same in both requests."""


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """The chat request that means the same.

    Raises:
        RequestError: an input item is malformed or of a kind that is not supported.
    """
    fields: dict[str, Any] = {name: getattr(request, name) for name in _TAKEN_OVER & request.model_fields_set}
    fields["messages"] = messages(request)
    if request.max_output_tokens is not None:
        fields["max_completion_tokens"] = request.max_output_tokens
    if request.wants_logprobs:
        fields.update(logprobs=True, top_logprobs=request.top_logprobs or 0)
    if request.reasoning is not None and request.reasoning.effort is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    if request.tools:
        fields["tools"] = [_tool(tool.model_dump(exclude_unset=True)) for tool in request.tools]
    if request.tools or request.tool_choice not in ("auto", "none"):
        fields["tool_choice"] = _tool_choice(request)
    if request.text is not None and request.text.format.type != "text":
        fields["response_format"] = _response_format(request)
    return ChatRequest.model_validate(fields)


def messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Instructions and input as chat messages.

    Reasoning, text and calls that follow each other belong to one message of the assistant, as they did when it
    wrote them.

    Raises:
        RequestError: as ``chat_request``.
    """
    found: list[dict[str, Any]] = []
    if request.instructions:
        found.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*found, {"role": "user", "content": request.input}]
    for index, item in enumerate(request.input):
        _add(found, item, f"input[{index}]")
    if not found:
        raise RequestError("input: there is no message in it", "input")
    return found


def _add(found: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(found, item, where)
    elif kind == "function_call":
        name = _text(item, "name", where)
        call_id = _text(item, "call_id", where)
        function = {"name": name, "arguments": _text(item, "arguments", where)}
        calls = _assistant(found, "tool_calls").setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})
    elif kind == "function_call_output":
        content = _content(item.get("output"), f"{where}.output")
        found.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content})
    elif kind == "reasoning":
        text = _reasoning(item, where)
        if text:
            found.append({"role": "assistant", "content": None, "reasoning_content": text})
    else:
        raise RequestError(
            f"{where}.type: {kind!r} is not supported; supported: {', '.join(_ITEMS)}", "input"
        )


def _add_message(found: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where}.role: {role!r} is not known; allowed: {', '.join(_ROLES)}", "input")
    content = _content(item.get("content"), f"{where}.content")
    if role == "assistant":
        _assistant(found, "content")["content"] = content
    else:
        found.append({"role": role, "content": content})


def _assistant(found: list[dict[str, Any]], adds: str) -> dict[str, Any]:
    """The assistant's message that an item belongs to: the last one, unless it has come further already."""
    last = found[-1] if found else None
    if last is not None and last["role"] == "assistant":
        complete = ("content", "tool_calls") if adds == "content" else ()
        if not any(last.get(key) for key in complete):
            return last
    found.append({"role": "assistant", "content": None})
    return found[-1]


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}: a string or a list of text parts is needed", "input")
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in _PARTS or not isinstance(text, str):
            raise RequestError(
                f"{where}[{index}]: a part of type {kind!r} is not supported; supported: {', '.join(_PARTS)}, "
                "with a text",
                "input",
            )
        parts.append({"type": "text", "text": text})
    return parts[0]["text"] if len(parts) == 1 else parts


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """The reasoning itself, or what is left of it in the summary."""
    for key in ("content", "summary"):
        parts = item.get(key) or []
        if not isinstance(parts, list):
            raise RequestError(f"{where}.{key}: a list of text parts is needed", "input")
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(f"{where}.{key}: every part needs a text", "input")
        if texts:
            return "\n".join(map(str, texts))
    return ""


def _text(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or (not value and key != "arguments"):
        raise RequestError(f"{where}.{key}: a string is needed", "input")
    return value


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    return choice if isinstance(choice, str) or choice is None else {"function": {"name": choice.name}}


def _response_format(request: ResponsesRequest) -> dict[str, Any]:
    assert request.text is not None
    form = request.text.format
    if form.type == "json_object":
        return {"type": "json_object"}
    schema = {"name": form.name, "schema": form.json_schema, "strict": form.strict}
    return {"type": "json_schema", "json_schema": schema}
