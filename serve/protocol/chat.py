"""Requests, answers and chunks of ``/v1/chat/completions``."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType
from pydantic import Field, WithJsonSchema

from serve.protocol.common import Body, Logprob, Metrics, ResponseFormat, SamplingFields, StreamOptions, Usage

_TEXT = {"type": "string"}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1}]},
        "tool_call_id": _TEXT,
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                "description": _TEXT,
                "parameters": {"type": "object"},
                "strict": {"type": "boolean"},
            },
        },
    },
}
Messages = Annotated[
    list[dict[str, Any]], WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1})
]
Tools = Annotated[list[dict[str, Any]], WithJsonSchema({"type": "array", "items": _TOOL, "minItems": 1})]


class ChosenFunction(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"] = "function"
    function: ChosenFunction


class ChatRequest(SamplingFields):
    """The body of a chat request.

    Messages and tools stay as the client sent them, keys in their order: templates print them. They are checked
    where the prompt is made.

    Attributes:
        max_completion_tokens: wins over ``max_tokens``; absent: the room left in the context.
        include_reasoning: false hides the reasoning text; its tokens are still counted.
        echo: answers begin with the last message if it has the role of the answer.
        add_generation_prompt: true if absent; it is false with ``continue_final_message``.
        documents, chat_template_kwargs: for the template.
        store, metadata, service_tier, modalities, prompt_cache_key, safety_identifier: not used; nothing is kept.
    """

    messages: Messages = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(default=None, max_length=32)
    include_reasoning: bool | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        """Most likely tokens to show for each token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs or self.logprob_token_ids else None


# ---- answers


class FunctionCall(Struct, omit_defaults=True):
    """Of an answer, or what a chunk adds to one."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(Struct):
    """A call; in chunks only the first one of a call has ``id`` and ``type``, and answers have no ``index``."""

    function: FunctionCall
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(Struct):
    """What a chunk adds to the message of a choice."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatLogprobs(Struct):
    content: list[Logprob]


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET


class Message(Struct):
    """``content`` is null if there are only calls, or only reasoning."""

    role: str
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    prompt_logprobs: list[dict[int, Any] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET
