"""How metrics, tracing and the dashboard learn what happens to a call, without the routes knowing any of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from jaxinfer.engine.client import EngineRequest
from jaxinfer.engine.deltas import OutputDelta

Operation = Literal["chat", "text_completion", "embeddings"]
"""Names of OpenTelemetry's GenAI conventions; ``/v1/responses`` is ``chat``."""


@dataclass(frozen=True)
class Call:
    """One HTTP call of a generating endpoint that the engine admitted.

    Attributes:
        call_id: the id that the client sees.
        model: the name that the client gave, or the first served one.
        requests: one per prompt.
        received: ``time.monotonic`` when the call arrived.
        headers: of the HTTP request, names in lower case; trace context is read from them.
    """

    call_id: str
    operation: Operation
    model: str
    requests: Sequence[EngineRequest]
    stream: bool
    received: float
    headers: Mapping[str, str] = field(default_factory=dict)


class CallObservation(Protocol):
    """Follows one call. Methods are called on the event loop, on the token path: they must not wait or raise."""

    def news(self, deltas: Sequence[OutputDelta]) -> None:
        """Deltas as they were taken from the engine."""
        ...

    def ended(self, error: str | None = None) -> None:
        """The call is over, whichever way: answered, left by the client, or failed. Called once."""
        ...


class CallObserver(Protocol):
    def started(self, call: Call) -> CallObservation: ...


class ObservedCall:
    """Passes what happens to one call on to several observations."""

    def __init__(self, observations: Sequence[CallObservation]) -> None:
        self._observations = observations

    def news(self, deltas: Sequence[OutputDelta]) -> None:
        for observation in self._observations:
            observation.news(deltas)

    def ended(self, error: str | None = None) -> None:
        for observation in self._observations:
            observation.ended(error)


class Observers:
    """Several observers as one."""

    def __init__(self, observers: Sequence[CallObserver] = ()) -> None:
        self._observers = tuple(observers)

    def started(self, call: Call) -> ObservedCall:
        return ObservedCall([observer.started(call) for observer in self._observers])
