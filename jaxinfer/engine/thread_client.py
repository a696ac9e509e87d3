"""ThreadClient: an engine on a thread of this process."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxinfer.config import EngineConfig
from jaxinfer.engine.admission import Admission
from jaxinfer.engine.build import Engine
from jaxinfer.engine.client import EngineDeadError, EngineDrainingError, EngineRequest
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.engine.inputs import Limits
from jaxinfer.engine.loop import EngineLoop
from jaxinfer.engine.snapshots import block_owners, take_snapshot
from jaxinfer.engine.streams import Stream, StreamTable
from jaxinfer.engine.validation import check
from jaxinfer.observability.profiler import Profiler
from jaxinfer.observability.snapshot import EngineSnapshot
from jaxinfer.tokenization.chat import ChatTemplate
from jaxinfer.tokenization.tokenizer import Tokenizer

STOP_TIMEOUT = 10.0
"""Seconds that a step may take to end at shutdown."""


class ThreadClient:
    """An ``EngineClient`` whose step loop runs on a thread. The loop starts at once; ``shutdown`` ends it.

    Args:
        bounded: readers that are too slow lose their requests (``server.max_buffered_tokens``); otherwise what they do
            not take is kept for them.
    """

    def __init__(self, engine: Engine, bounded: bool = True) -> None:
        self._engine = engine
        limit = engine.config.server.max_buffered_tokens if bounded else None
        self._streams = StreamTable(limit, self._abort_keys)
        self._profiler = Profiler()
        self._draining = False
        self._stalled: EngineDeadError | None = None
        self._inbox: list[list[OutputDelta]] = []
        self._woken = False
        self._lock = threading.Lock()
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._loop = EngineLoop(engine.core, self._on_step, self._on_end)
        self._admission = Admission(engine.inputs, engine.core, self._loop)
        self._loop.start()

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def loop(self) -> EngineLoop:
        return self._loop

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def limits(self) -> Limits:
        return self._engine.limits

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        return self._engine.chat_template

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return self._engine.sampling_defaults

    @property
    def num_requests(self) -> int:
        """Requests in flight, as this side knows them."""
        return len(self._streams)

    def check(self, requests: Sequence[EngineRequest]) -> None:
        check(self._engine.inputs, requests)

    async def submit(self, requests: Sequence[EngineRequest]) -> Stream:
        self._bind()
        self.check_ready()
        stream = self._streams.open(requests)
        try:
            await asyncio.wrap_future(self._admission.submit(stream.keys, requests))
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def abort(self, request_id: str) -> None:
        key = self._streams.key(request_id)
        if key is not None:
            self._abort_keys([key])

    def snapshot(self) -> EngineSnapshot:
        return take_snapshot(self._engine.core, self._engine.compilations)

    async def block_owners(self) -> tuple[int, ...]:
        kv = self._engine.core.scheduler.kv
        return await asyncio.wrap_future(self._loop.call(lambda: block_owners(kv)))

    def check_health(self) -> None:
        error = self._stalled or self._loop.error
        watchdog = self.config.server.watchdog
        if error is None and self._loop.stalled_for > watchdog:
            # For good, even if the step ends after all: clients were told.
            error = self._stalled = EngineDeadError(
                f"the engine has work, but finished no step for {watchdog:g} s"
            )
            self._streams.end(error)
        if error is not None:
            raise EngineDeadError(str(error)) from error

    def check_ready(self) -> None:
        self.check_health()
        if self._draining:
            raise EngineDrainingError("the server is shutting down")

    async def reset_prefix_cache(self) -> int:
        kv = self._engine.core.scheduler.kv
        return await asyncio.wrap_future(self._loop.call(kv.reset_prefix_cache))

    async def start_profile(self, directory: str) -> None:
        await asyncio.to_thread(self._profiler.start, directory)

    async def stop_profile(self) -> None:
        await asyncio.to_thread(self._profiler.stop)

    async def drain(self, timeout: float) -> None:
        self._draining = True
        others = asyncio.wrap_future(self._engine.core.drain())
        await asyncio.gather(self._streams.drain(timeout), asyncio.wait([others], timeout=timeout))

    async def shutdown(self) -> None:
        await asyncio.to_thread(self.stop, STOP_TIMEOUT if self._stalled is None else 0.0)
        self._streams.end(self._loop.error or EngineDeadError("the engine was shut down"))

    def stop(self, timeout: float | None = None) -> None:
        """The blocking part of ``shutdown``.

        A step that hangs is left behind after ``timeout`` seconds, as a thread cannot be ended from outside.
        """
        self._admission.close()
        self._loop.stop()
        self._loop.join(timeout)
        self._engine.compilations.close()

    # ---- between the threads

    def _bind(self) -> None:
        """Remembers the event loop: the news go there. A later one may take the place of one that is closed."""
        loop = asyncio.get_running_loop()
        if self._event_loop is not loop:
            assert self._event_loop is None or self._event_loop.is_closed(), "used from two event loops"
            with self._lock:
                self._event_loop = loop
                self._inbox.clear()
                self._woken = False

    def _abort_keys(self, keys: Sequence[str]) -> None:
        self._admission.abort(keys)

    def _on_step(self, deltas: list[OutputDelta]) -> None:
        """On the loop's thread. One wake-up takes all that came until it is served, so a busy event loop is not
        flooded with them."""
        if not deltas:
            return
        with self._lock:
            self._inbox.append(deltas)
            if self._woken:
                return
            self._woken = True
        self._call_soon(self._take_inbox)

    def _take_inbox(self) -> None:
        with self._lock:
            batches, self._inbox = self._inbox, []
            self._woken = False
        self._streams.deliver(delta for batch in batches for delta in batch)

    def _on_end(self, error: EngineDeadError) -> None:
        self._call_soon(lambda: self._streams.end(error))

    def _call_soon(self, function: Callable[[], None]) -> None:
        with self._lock:
            loop = self._event_loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                loop.call_soon_threadsafe(function)
