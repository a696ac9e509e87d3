"""How front ends talk to an engine, whose step loop runs on a thread of this process or in a process of its own."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from jaxinfer.config import EngineConfig
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.engine.inputs import Limits
from jaxinfer.observability.snapshot import EngineSnapshot
from jaxinfer.request import Pooling, QueueFullError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenization.chat import ChatTemplate
from jaxinfer.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineRequest:
    """A tokenized request: plain data that can cross a process border.

    Attributes:
        request_id: names the request in outputs; unique among those in flight.
        prompt_token_ids: the prompt.
        params: what to generate; of no effect with ``pooling``.
        priority: smaller is more urgent.
        cache_salt: isolates the prefix cache.
        pooling: return the pooled hidden state of the prompt instead of generating.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    pooling: Pooling | None = None


class EngineDeadError(RuntimeError):
    """The step loop ended with an error, or does not answer; no request can be served any more."""


class EngineDrainingError(QueueFullError):
    """The engine finishes what runs before it stops, and takes nothing new."""


class OutputStream(Protocol):
    """News of the requests of one ``submit``. Leaving it (``aclose``, or the end of ``async with``) aborts what runs.

    Iteration ends when every choice of every request has its last delta. Items are never empty. News that wait to be
    taken are bounded (``server.max_buffered_tokens``): a request whose reader is too slow is aborted, with an error.

    Raises:
        EngineDeadError: from the iteration.
    """

    def __aiter__(self) -> AsyncIterator[list[OutputDelta]]: ...

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class EngineClient(Protocol):
    """An engine as front ends see it. All methods are called on one event loop."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def chat_template(self) -> ChatTemplate: ...

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Sampling parameters that the model's ``generation_config.json`` recommends; see ``Engine``."""
        ...

    def check(self, requests: Sequence[EngineRequest]) -> None:
        """Validates requests without queueing them; grammars are not compiled.

        Raises:
            RequestError: says what is wrong, with the parameter.
        """
        ...

    async def submit(self, requests: Sequence[EngineRequest]) -> OutputStream:
        """Validates and queues requests, all of them or none. Grammars are compiled off the event loop and off the
        step loop.

        Raises:
            RequestError: a request is not valid, its grammar included, or its id is in use.
            QueueFullError: an admission limit is reached.
            EngineDrainingError: the engine drains.
            EngineDeadError: the engine failed.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request with finish reason ``abort``; unknown ids are ignored."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """The engine's newest counters and gauges; true at the time of the call, not of the last step. Without the
        pool map."""
        ...

    async def block_owners(self) -> tuple[int, ...]:
        """The pool map as it is now, as in ``EngineSnapshot.block_owners``."""
        ...

    def check_health(self) -> None:
        """Raises:
        EngineDeadError: the loop ended, or work waits and no step was finished within the watchdog time.
        """
        ...

    def check_ready(self) -> None:
        """Whether new requests are taken; costs nothing.

        Raises:
            EngineDeadError: as ``check_health``.
            EngineDrainingError: the engine drains.
        """
        ...

    async def reset_prefix_cache(self) -> int:
        """Forgets all cached blocks that no running request uses; returns how many."""
        ...

    async def start_profile(self, directory: str) -> None:
        """Starts ``jax.profiler`` in the engine's process.

        Raises:
            RequestError: it runs already.
        """
        ...

    async def stop_profile(self) -> None: ...

    async def drain(self, timeout: float) -> None:
        """Refuses new requests, waits until all in flight are finished or ``timeout`` seconds are over, and aborts the
        rest; prompts that are computed for other engines included."""
        ...

    async def shutdown(self) -> None:
        """Stops the loop; open streams end with ``EngineDeadError``. No thread or process is left."""
        ...
