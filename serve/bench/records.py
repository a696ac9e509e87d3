"""What is measured of one request, from the client's side."""

from dataclasses import dataclass, field
from typing import Any

import msgspec


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass
class RequestRecord:
    """Times of one request, in seconds from the start of the load.

    Attributes:
        due: its arrival.
        sent: when it was sent. ``sent - due`` is the wait for a place under a concurrency limit; without a limit it is
            what the load generator was late.
        times: arrival of each chunk that carries output; several tokens may come in one chunk.
        ended: the last chunk of the choice.
        prompt_tokens, output_tokens, cached_tokens: as the server reports them; None until then.
        error: why it failed; None: it did not.
        text: what was generated.
    """

    due: float
    expected_prompt_len: int = 0
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None and bool(self.times)

    @property
    def num_output_tokens(self) -> int:
        """Reported by the server, else one per chunk."""
        return len(self.times) if self.output_tokens is None else self.output_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self.expected_prompt_len if self.prompt_tokens is None else self.prompt_tokens

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def e2el(self) -> float:
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token without the first one; None for a single token."""
        tokens = self.num_output_tokens - 1
        return (self.ended - self.times[0]) / tokens if tokens > 0 else None

    @property
    def itl(self) -> list[float]:
        """Gaps between chunks."""
        return [after - before for before, after in zip(self.times, self.times[1:])]


class StreamReader:
    """Turns the events of one answer into its record.

    Output is text, reasoning or calls of a choice, and a completion's chunk that does not end it: its text may be empty
    because a character is not complete. The chunk that opens a chat message with its role carries none.

    Args:
        origin: the start of the load on the clock of the events.
    """

    def __init__(self, record: RequestRecord, origin: float, keep_text: bool) -> None:
        self._record, self._origin, self._keep_text = record, origin, keep_text

    def on_event(self, data: bytes, now: float) -> None:
        record = self._record
        if data == b"[DONE]":
            return
        try:
            chunk = _decode(data)
        except msgspec.DecodeError as error:
            record.error = record.error or f"a chunk cannot be read: {error}"
            return
        if chunk.error is not None:
            record.error = record.error or f"error in the stream: {chunk.error}"[:500]
            return
        if chunk.usage is not None:
            self._count(chunk.usage)
        for choice in chunk.choices:
            self._read(choice, now - self._origin)

    def _read(self, choice: _Choice, now: float) -> None:
        record, delta = self._record, choice.delta
        if delta is None:
            text = choice.text or ""
            output = bool(text) or choice.finish_reason is None
        else:
            text = delta.content or delta.reasoning_content or delta.reasoning or ""
            output = bool(text) or bool(delta.tool_calls)
        if choice.finish_reason is not None:
            record.finish_reason = choice.finish_reason
            output = output or not record.times
        if output:
            record.times.append(now)
        record.ended = now
        if self._keep_text:
            record.text += text

    def _count(self, usage: _Usage) -> None:
        record = self._record
        record.prompt_tokens = usage.prompt_tokens
        record.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens
