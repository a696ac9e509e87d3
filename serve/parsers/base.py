"""What a model's text turns into: content, reasoning and tool calls, as events."""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class TextDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins; its first ``ToolArgumentsDelta`` follows.

    Attributes:
        index: counts the calls of the choice, from 0.
        id: unique over all choices.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolArgumentsDelta:
    """More of the arguments of a call.

    Attributes:
        text: the joined texts of an index are the arguments as the model wrote them: one JSON text if the call is
            complete, ``{}`` if the model gave none, and a beginning of one if the output was cut.
    """

    index: int
    text: str


Event = TextDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta


class OutputParser(Protocol):
    """Reads the text of one choice as it is generated.

    The folded events (see ``fold``) do not depend on how the text is cut into pieces. Text is never lost: what is
    neither reasoning nor a call is content, apart from white space between calls and around reasoning.
    """

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """The end of the text: gives out what was held back. Nothing may be pushed after it."""
        ...

    @property
    def num_complete_calls(self) -> int:
        """Calls that were given out and whose text ended as it should."""
        ...


@dataclass
class FoldedCall:
    id: str
    name: str
    arguments: str = ""


@dataclass
class Folded:
    """A whole answer.

    Attributes:
        reasoning: None if there was none.
        calls: in the order of their indices.
    """

    content: str = ""
    reasoning: str | None = None
    calls: list[FoldedCall] = field(default_factory=list)

    def add(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case TextDelta(text):
                    self.content += text
                case ReasoningDelta(text):
                    self.reasoning = (self.reasoning or "") + text
                case ToolCallStart(index, call_id, name):
                    assert index == len(self.calls), "call indices count up"
                    self.calls.append(FoldedCall(call_id, name))
                case ToolArgumentsDelta(index, text):
                    self.calls[index].arguments += text


def fold(events: list[Event]) -> Folded:
    """The non-streamed answer that a stream of events adds up to."""
    folded = Folded()
    folded.add(events)
    return folded
