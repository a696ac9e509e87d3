"""Answers and stream events of ``/v1/responses``."""

from typing import Any

from msgspec import Struct

from serve.protocol.common import Logprob


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[str] = []
    logprobs: list[Logprob] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(Struct, tag_field="type", tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    id: str
    status: str
    content: list[ReasoningText]
    summary: list[str] = []


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    """``call_id`` joins the call with its output, ``id`` names the item."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


Item = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponsesUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: str


class ResponseObject(Struct):
    """An answer, or its state within a stream; the fields of the request are repeated in it.

    ``store`` is always false: nothing is kept.
    """

    id: str
    created_at: int
    status: str
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    tool_choice: Any
    tools: list[dict[str, Any]]
    temperature: float
    top_p: float
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: dict[str, str]
    top_logprobs: int
    object: str = "response"
    instructions: str | None = None
    max_output_tokens: int | None = None
    usage: ResponsesUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
    previous_response_id: str | None = None
    truncation: str = "disabled"
    background: bool = False
    store: bool = False
    service_tier: str = "default"
    user: str | None = None


# ---- events; ``type`` is also the name of the SSE event


class StateEvent(Struct):
    """``response.created``, ``.in_progress`` and whichever event ends the stream."""

    type: str
    sequence_number: int
    response: ResponseObject


class ItemEvent(Struct):
    """``response.output_item.added`` and ``.done``."""

    type: str
    sequence_number: int
    output_index: int
    item: Item


class PartEvent(Struct):
    """``response.content_part.added`` and ``.done``."""

    type: str
    sequence_number: int
    output_index: int
    item_id: str
    part: OutputText | ReasoningText
    content_index: int = 0


class TextDeltaEvent(Struct):
    sequence_number: int
    output_index: int
    item_id: str
    delta: str
    logprobs: list[Logprob] = []
    content_index: int = 0
    type: str = "response.output_text.delta"


class TextDoneEvent(Struct):
    sequence_number: int
    output_index: int
    item_id: str
    text: str
    logprobs: list[Logprob] = []
    content_index: int = 0
    type: str = "response.output_text.done"


class ReasoningDeltaEvent(Struct):
    sequence_number: int
    output_index: int
    item_id: str
    delta: str
    content_index: int = 0
    type: str = "response.reasoning_text.delta"


class ReasoningDoneEvent(Struct):
    sequence_number: int
    output_index: int
    item_id: str
    text: str
    content_index: int = 0
    type: str = "response.reasoning_text.done"


class ArgumentsDeltaEvent(Struct):
    sequence_number: int
    output_index: int
    item_id: str
    delta: str
    type: str = "response.function_call_arguments.delta"


class ArgumentsDoneEvent(Struct):
    sequence_number: int
    output_index: int
    item_id: str
    name: str
    arguments: str
    type: str = "response.function_call_arguments.done"


Event = (
    StateEvent
    | ItemEvent
    | PartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
)
