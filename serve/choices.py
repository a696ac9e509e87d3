"""From the news of a choice to what a chat client reads: parsed events, finish reason, and counts of tokens."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxinfer.engine.deltas import TokenLogprobs
from jaxinfer.request import FinishReason
from serve.generation import ChoiceNews
from serve.parsers.base import Event, OutputParser, ReasoningDelta
from serve.parsers.finish import finish_reason
from serve.parsers.reasoning import THINK_END

_END = THINK_END.encode()


@dataclass(slots=True)
class ChatNews:
    """What a client may learn at once; empty news are possible.

    Attributes:
        events: in the order of the text.
        token_ids, logprobs: of all tokens since the last news that were not empty, in step with each other. They
            belong to the events as far as a parser does not hold text back.
        finish_reason: set in the last news; as clients know it.
    """

    events: Sequence[Event]
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish_reason: str | None
    stop_reason: int | str | None

    @property
    def empty(self) -> bool:
        return not self.events and self.finish_reason is None


class ReasoningCount:
    """Tokens of the reasoning of one choice, its end mark included, whatever the news are cut into.

    Args:
        token_bytes: of the tokenizer.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self.tokens = 0
        self._token_bytes = token_bytes
        self._text = bytearray()
        self._ends: list[int] = []
        self._seen = False
        self._over = False

    def add(self, events: Sequence[Event], token_ids: Sequence[int]) -> None:
        if self._over:
            return
        searched = max(len(self._text) - len(_END), 0)
        for token in token_ids:
            self._text += self._token_bytes(token)
            self._ends.append(len(self._text))
        self._seen = self._seen or any(isinstance(event, ReasoningDelta) for event in events)
        end = self._text.find(_END, searched)
        self._over = end >= 0 or (not self._seen and bool(events))
        if self._seen:
            self.tokens = len(self._ends) if end < 0 else bisect_left(self._ends, end + len(_END)) + 1


class ChoiceReader:
    """Reads one choice.

    Args:
        named: ``tool_choice`` names a function.
        include_reasoning: False drops the reasoning text; its tokens are still counted.
        reasoning: counts the tokens of the reasoning; None if the model does not reason.
    """

    def __init__(
        self,
        parser: OutputParser,
        named: bool = False,
        include_reasoning: bool = True,
        reasoning: ReasoningCount | None = None,
    ) -> None:
        self._parser = parser
        self._named = named
        self._include_reasoning = include_reasoning
        self._reasoning = reasoning
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._reasoning is None else self._reasoning.tokens

    def read(self, news: ChoiceNews) -> ChatNews:
        """What a client reads of it. Tokens that show no event yet wait for the next one."""
        events = self._parser.push(news.text) if news.text else []
        reason = None
        if news.finish_reason is not None:
            events = [*events, *self._parser.finish()]
            ended = FinishReason(news.finish_reason)
            reason = finish_reason(ended, self._parser.num_complete_calls, self._named)
        if self._reasoning is not None:
            self._reasoning.add(events, news.token_ids)
        if not self._include_reasoning:
            events = [event for event in events if not isinstance(event, ReasoningDelta)]
        self._token_ids += news.token_ids
        self._logprobs += news.logprobs
        read = ChatNews(events, (), (), reason, news.stop_reason)
        if not read.empty:
            read.token_ids, self._token_ids = self._token_ids, []
            read.logprobs, self._logprobs = self._logprobs, []
        return read
