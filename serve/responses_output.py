"""The events of a response, in their order; the answer without streaming is what the last one holds."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from serve.parsers.base import Event as ParserEvent
from serve.parsers.base import ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart
from serve.protocol.common import Logprob
from serve.protocol.response_events import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    Event,
    FunctionCallItem,
    IncompleteDetails,
    Item,
    ItemEvent,
    MessageItem,
    OutputText,
    PartEvent,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponsesUsage,
    StateEvent,
    TextDeltaEvent,
    TextDoneEvent,
)

_PREFIXES = {"message": "msg", "reasoning": "rs", "call": "fc"}


@dataclass
class _OpenItem:
    """The item that is being written."""

    kind: Literal["message", "reasoning", "call"]
    index: int
    id: str
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)


class ResponseWriter:
    """Writes the items of a response one after the other.

    Returned events share objects with the response: encode them before the next call.

    Args:
        response: in progress, without output.
    """

    def __init__(self, response: ResponseObject) -> None:
        self.response = response
        self._number = 0
        self._open: _OpenItem | None = None

    def begin(self) -> list[Event]:
        return [self._state("response.created"), self._state("response.in_progress")]

    def add(self, events: Sequence[ParserEvent], logprobs: Sequence[Logprob]) -> list[Event]:
        """Events for what a choice brought.

        Args:
            logprobs: of its tokens; they go to the text, if any, as only text has a place for them.
        """
        out: list[Event] = []
        for event in events:
            match event:
                case TextDelta(text):
                    item = self._item("message", out)
                    item.logprobs += logprobs
                    delta = TextDeltaEvent(self._next(), item.index, item.id, text, list(logprobs))
                    logprobs = ()
                    self._push(item, text, delta, out)
                case ReasoningDelta(text):
                    item = self._item("reasoning", out)
                    self._push(item, text, ReasoningDeltaEvent(self._next(), item.index, item.id, text), out)
                case ToolCallStart(_, call_id, name):
                    out += self._close("completed")
                    self._start(_OpenItem("call", 0, "", name, call_id), out)
                case ToolArgumentsDelta(_, text):
                    item = self._item("call", out)
                    self._push(item, text, ArgumentsDeltaEvent(self._next(), item.index, item.id, text), out)
        return out

    def end(self, finish_reason: str, usage: ResponsesUsage) -> list[Event]:
        """The last events. A response that reached the length limit is incomplete."""
        cut = finish_reason == "length"
        status = "incomplete" if cut else "completed"
        if not self.response.output and self._open is None:
            opened: list[Event] = []
            self._item("message", opened)  # an answer without text is an empty message
        else:
            opened = []
        out = [*opened, *self._close(status)]
        self.response.usage = usage
        self.response.status = status
        self.response.completed_at = None if cut else int(time.time())
        self.response.incomplete_details = IncompleteDetails("max_output_tokens") if cut else None
        return [*out, self._state(f"response.{status}")]

    def fail(self, message: str, code: str = "server_error") -> list[Event]:
        """What ends a response that cannot be completed."""
        out = self._close("incomplete")
        self.response.status = "failed"
        self.response.error = ResponseError(code, message)
        return [*out, self._state("response.failed")]

    def _item(self, kind: Literal["message", "reasoning", "call"], out: list[Event]) -> _OpenItem:
        """The open item of this kind; opened if another one is, which is closed."""
        if self._open is None or self._open.kind != kind:
            assert kind != "call", "arguments come after the start of their call"
            out += self._close("completed")
            self._start(_OpenItem(kind, 0, ""), out)
        assert self._open is not None
        return self._open

    def _start(self, item: _OpenItem, out: list[Event]) -> None:
        item.index = len(self.response.output)
        item.id = f"{_PREFIXES[item.kind]}_{secrets.token_hex(12)}"
        self._open = item
        out.append(
            ItemEvent("response.output_item.added", self._next(), item.index, _build(item, "in_progress"))
        )
        if item.kind != "call":
            part = _part(item)
            out.append(PartEvent("response.content_part.added", self._next(), item.index, item.id, part))

    def _push(self, item: _OpenItem, text: str, delta: Event, out: list[Event]) -> None:
        item.pieces.append(text)
        out.append(delta)

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        out: list[Event] = []
        text = "".join(item.pieces)
        match item.kind:
            case "message":
                out.append(TextDoneEvent(self._next(), item.index, item.id, text, item.logprobs))
            case "reasoning":
                out.append(ReasoningDoneEvent(self._next(), item.index, item.id, text))
            case "call":
                out.append(ArgumentsDoneEvent(self._next(), item.index, item.id, item.name, text))
        if item.kind != "call":
            out.append(
                PartEvent("response.content_part.done", self._next(), item.index, item.id, _part(item))
            )
        built = _build(item, status)
        self.response.output.append(built)
        out.append(ItemEvent("response.output_item.done", self._next(), item.index, built))
        return out

    def _state(self, kind: str) -> StateEvent:
        return StateEvent(kind, self._next(), self.response)

    def _next(self) -> int:
        self._number += 1
        return self._number - 1


def _part(item: _OpenItem) -> OutputText | ReasoningText:
    text = "".join(item.pieces)
    if item.kind == "message":
        return OutputText(text, [], list(item.logprobs))
    return ReasoningText(text)


def _build(item: _OpenItem, status: str) -> Item:
    """The item as it is now; without content parts while nothing is written."""
    if item.kind == "call":
        return FunctionCallItem(item.id, status, item.call_id, item.name, "".join(item.pieces))
    part = _part(item)
    started = status != "in_progress"
    if isinstance(part, OutputText):
        return MessageItem(item.id, status, [part] if started else [])
    return ReasoningItem(item.id, status, [part] if started else [])
