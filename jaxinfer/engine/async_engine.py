"""AsyncEngine: the step loop on a thread of its own, and asyncio streams of outputs."""

import asyncio
import gc
import itertools
import logging
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jaxinfer.config import EngineConfig
from jaxinfer.engine.assembly import OutputAssembler
from jaxinfer.engine.build import Engine, build_engine
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.engine.inputs import Prompt
from jaxinfer.outputs import RequestOutput
from jaxinfer.request import RequestError, Sequence
from jaxinfer.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

Command = Callable[[], None]


class EngineDeadError(RuntimeError):
    """The step loop ended with an error; no request can be served any more."""


@dataclass(eq=False)
class _Stream:
    """One request between the loop thread and its consumer. What is not taken yet merges into one output, so a slow
    reader costs no more memory than its output.

    Attributes:
        key: the request's id in the core. It is never used twice, so that late news of a request that was left
            cannot reach another one to which the user gave the same id.
    """

    key: str
    assembler: OutputAssembler
    news: asyncio.Event
    loop: asyncio.AbstractEventLoop
    error: Exception | None = None


class AsyncEngine:
    """Serves concurrent requests. Use it as an async context manager, or call ``shutdown``.

    Args:
        engine: what ``build_engine`` returns.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        """By the core's key."""
        self._keys: dict[str, str] = {}
        """The core's key of each request id in use."""
        self._count = itertools.count()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(cls, config: str | Path | EngineConfig, **overrides: Any) -> Self:
        """Loads a model and starts the loop; see ``LLM`` for the arguments.

        What the process holds by then is taken out of the garbage collector's sight: it lives as long as the
        engine, and a full collection that walks over it stops the loop for 0.2 s.
        """
        engine = build_engine(EngineConfig.load(config, overrides))
        gc.collect()
        gc.freeze()
        return cls(engine)

    @property
    def engine(self) -> Engine:
        return self._engine

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        """Yields outputs until the request is finished. Leaving the iteration early aborts the request.

        Raises:
            RequestError: the request is not valid, or its id is in use.
            QueueFullError: too many requests wait.
            EngineDeadError: the engine failed.
        """
        params = params or SamplingParams()
        request_id = request_id or uuid.uuid4().hex
        key = f"{request_id}#{next(self._count)}"
        sequences = self._engine.inputs.process(key, prompt, params, priority, add_special_tokens)
        stream = _Stream(
            key,
            OutputAssembler(sequences[0].request, self._engine.tokenizer, request_id),
            asyncio.Event(),
            asyncio.get_running_loop(),
        )
        self._register(request_id, stream)
        try:
            await self._submit(sequences)
            while True:
                await stream.news.wait()
                output = self._take(stream)
                if output is not None:
                    yield output
                    if output.finished:
                        return
        finally:
            with self._lock:
                del self._streams[key], self._keys[request_id]
            self._commands.put(lambda: self._engine.core.abort(key))

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream yields a last output with finish reason ``abort``. Unknown ids are ignored."""
        with self._lock:
            key = self._keys.get(request_id)
        if key is not None:
            self._commands.put(lambda: self._engine.core.abort(key))

    def shutdown(self) -> None:
        """Stops the loop; open streams end with ``EngineDeadError``."""
        self._commands.put(None)
        self._thread.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)

    # ---- event-loop side

    def _register(self, request_id: str, stream: _Stream) -> None:
        with self._lock:
            if self._error is not None:
                raise EngineDeadError(str(self._error)) from self._error
            if request_id in self._keys:
                raise RequestError(f"request id {request_id!r} is in use", "request_id")
            self._keys[request_id] = stream.key
            self._streams[stream.key] = stream

    async def _submit(self, sequences: list[Sequence]) -> None:
        loop = asyncio.get_running_loop()
        admitted: asyncio.Future[None] = loop.create_future()

        def add() -> None:
            try:
                self._engine.core.add(sequences)
            except Exception as error:  # handed to the caller, whose request it concerns
                loop.call_soon_threadsafe(_settle, admitted, error)
            else:
                loop.call_soon_threadsafe(_settle, admitted, None)

        self._commands.put(add)
        with self._lock:
            if self._error is not None:
                raise EngineDeadError(str(self._error)) from self._error
        await admitted

    def _take(self, stream: _Stream) -> RequestOutput | None:
        with self._lock:
            stream.news.clear()
            if stream.assembler.due:
                output = stream.assembler.take()
                if stream.error is not None:
                    stream.news.set()  # nothing else will wake the consumer again
                return output
            if stream.error is not None:
                raise EngineDeadError(str(stream.error)) from stream.error
            return None

    # ---- loop thread

    def _run(self) -> None:
        try:
            while self._run_commands(wait=not self._engine.core.has_work):
                self._deliver(self._engine.core.step())
        except Exception as error:
            logger.exception("the engine failed")
            self._die(error)
        else:
            self._die(EngineDeadError("the engine was shut down"))

    def _run_commands(self, wait: bool) -> bool:
        """Runs what is queued, waiting for the first command if there is nothing else to do; False to stop."""
        try:
            command = self._commands.get(block=wait)
            while True:
                if command is None:
                    return False
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return True

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        with self._lock:
            for delta in deltas:
                stream = self._streams.get(delta.request_id)
                if stream is not None:
                    stream.assembler.add(delta)
                    if stream.assembler.due:
                        _notify(stream)

    def _die(self, error: Exception) -> None:
        with self._lock:
            self._error = error
            for stream in self._streams.values():
                stream.error = error
                _notify(stream)
        self._refuse_commands()

    def _refuse_commands(self) -> None:
        """Answers what was queued while the loop ended: nobody may wait for it for ever."""
        with suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    with suppress(Exception):
                        command()


def _notify(stream: _Stream) -> None:
    if not stream.loop.is_closed():
        stream.loop.call_soon_threadsafe(stream.news.set)


def _settle(future: "asyncio.Future[None]", error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
