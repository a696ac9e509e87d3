"""Chunks of a chat, and the answer that they add up to: streaming and not streaming are the same code."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET

from jaxinfer.engine.deltas import TokenLogprobs
from jaxinfer.tokenization.tokenizer import Tokenizer
from serve.choices import ChatNews
from serve.logprobs import LogprobWriter, clamp
from serve.parsers.base import Event, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart
from serve.protocol.chat import (
    ChatChoice,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    FunctionCall,
    Message,
    ToolCall,
)
from serve.protocol.common import Logprob, TopLogprob


class ChatLogprobWriter(LogprobWriter):
    """Also spells tokens as chats show them, with their bytes: those are exact where a text cannot be."""

    def __init__(self, tokenizer: Tokenizer, as_token_ids: bool) -> None:
        super().__init__(tokenizer, as_token_ids)
        self._bytes = tokenizer.token_bytes

    def chat(self, entry: TokenLogprobs, num_top: int) -> Logprob:
        """A token; ``top_logprobs`` holds exactly as many as were asked for, and behind them those named by id."""
        top = [
            TopLogprob(self.token(token), clamp(value), list(self._bytes(token)))
            for token, value in (*entry.top[:num_top], *entry.named)
        ]
        token = entry.token_id
        return Logprob(self.token(token), clamp(entry.logprob), list(self._bytes(token)), top)


@dataclass(frozen=True)
class ChatOptions:
    """What chunks show besides text and calls.

    Attributes:
        reasoning_field: where reasoning text goes.
        num_top: most likely tokens to show for each token; None: no log-probabilities.
        writer: spells tokens.
        token_ids: show the ids of the tokens.
    """

    reasoning_field: str
    writer: ChatLogprobWriter
    num_top: int | None = None
    token_ids: bool = False

    @property
    def logprobs(self) -> bool:
        return self.num_top is not None


def chunk_choices(index: int, news: ChatNews, options: ChatOptions) -> list[ChunkChoice]:
    """The parts of chunks that tell the news of one choice: one, or two if a call and the end come together, as some
    clients finish a call only with a later chunk."""
    choice = ChunkChoice(index, delta(news.events, options.reasoning_field))
    if options.num_top is not None and news.logprobs:
        num_top = options.num_top
        choice.logprobs = ChatLogprobs([options.writer.chat(entry, num_top) for entry in news.logprobs])
    if options.token_ids:
        choice.token_ids = list(news.token_ids)
    if news.finish_reason is None:
        return [choice]
    last = choice if choice.delta.tool_calls is UNSET else ChunkChoice(index, Delta())
    last.finish_reason = news.finish_reason
    last.stop_reason = news.stop_reason
    return [choice] if last is choice else [choice, last]


def delta(events: Sequence[Event], reasoning_field: str) -> Delta:
    """All events in one delta. Pieces of one call are joined: clients take the first entry of an index whole."""
    out = Delta()
    calls: dict[int, ToolCall] = {}
    for event in events:
        match event:
            case TextDelta(text):
                out.content = text if out.content is UNSET else out.content + text
            case ReasoningDelta(text) if reasoning_field == "reasoning":
                out.reasoning = text if out.reasoning is UNSET else out.reasoning + text
            case ReasoningDelta(text):
                so_far = "" if out.reasoning_content is UNSET else out.reasoning_content
                out.reasoning_content = so_far + text
            case ToolCallStart(index, call_id, name):
                calls[index] = ToolCall(FunctionCall(name, ""), index, call_id, "function")
            case ToolArgumentsDelta(index, text):
                call = calls.setdefault(index, ToolCall(FunctionCall(arguments=""), index))
                assert call.function.arguments is not UNSET
                call.function.arguments += text
    if calls:
        out.tool_calls = list(calls.values())
    return out


@dataclass
class FoldedChoice:
    """A choice, put together from its chunks as a client would."""

    index: int
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, ToolCall] = field(default_factory=dict)
    logprobs: list[Logprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "stop"
    stop_reason: int | str | None = None

    def add(self, chunk: ChunkChoice) -> None:
        delta = chunk.delta
        if delta.content is not UNSET:
            self.content.append(delta.content)
        for text in (delta.reasoning, delta.reasoning_content):
            if text is not UNSET:
                self.reasoning.append(text)
        for call in () if delta.tool_calls is UNSET else delta.tool_calls:
            self._add_call(call)
        if chunk.logprobs is not None:
            self.logprobs += chunk.logprobs.content
        if chunk.token_ids is not UNSET:
            self.token_ids += chunk.token_ids
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            self.stop_reason = None if chunk.stop_reason is UNSET else chunk.stop_reason

    def _add_call(self, call: ToolCall) -> None:
        assert call.index is not UNSET
        first = self.calls.get(call.index)
        if first is None:
            self.calls[call.index] = ToolCall(call.function, UNSET, call.id, call.type)
        else:
            assert first.function.arguments is not UNSET
            assert call.function.arguments is not UNSET
            first.function.arguments += call.function.arguments

    def choice(self, role: str, options: ChatOptions) -> ChatChoice:
        """The finished choice. Its content is null only if there are calls and no text."""
        content = "".join(self.content)
        message = Message(role, content if content or not self.calls else None)
        reasoning: Any = "".join(self.reasoning) if self.reasoning else UNSET
        if options.reasoning_field == "reasoning":
            message.reasoning = reasoning
        else:
            message.reasoning_content = reasoning
        if self.calls:
            message.tool_calls = list(self.calls.values())
        return ChatChoice(
            self.index,
            message,
            ChatLogprobs(self.logprobs) if options.logprobs else None,
            self.finish_reason,
            self.stop_reason,
            self.token_ids if options.token_ids else UNSET,
        )
