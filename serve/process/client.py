"""ProcessClient: an engine in a process of its own."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import msgspec

from jaxinfer.config import EngineConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.engine.client import EngineDeadError, EngineDrainingError, EngineRequest
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.engine.inputs import Limits
from jaxinfer.engine.streams import Stream, StreamTable
from jaxinfer.engine.validation import check
from jaxinfer.observability.snapshot import MAX_STEP_RECORDS, EngineSnapshot
from jaxinfer.tokenization.chat import ChatTemplate
from jaxinfer.tokenization.tokenizer import Tokenizer
from serve.front_end import load_front_end
from serve.process import wire
from serve.process.channel import ENGINE_COMMAND, EngineProcess

Progress = Callable[[str, int, int], None]

STOP_TIMEOUT = 15.0


class EngineStartError(RuntimeError):
    """The engine process could not build its engine."""


class ProcessClient:
    """An ``EngineClient`` that talks to an engine process; made by ``start``."""

    def __init__(self, config: EngineConfig, command: Sequence[str], progress: Progress | None) -> None:
        self._config = config
        self._progress = progress
        self._streams = StreamTable(config.server.max_buffered_tokens, self._abort_keys)
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._ready: asyncio.Future[wire.Ready] = asyncio.get_running_loop().create_future()
        self._error: EngineDeadError | None = None
        self._draining = False
        self._snapshot = EngineSnapshot()
        self._heard = time.monotonic()
        self._stalled_for = 0.0
        self._process = EngineProcess(config, command, self._on_messages, self._on_exit)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        progress: Progress | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> Self:
        """Starts the engine process and waits until its engine is ready. Only text is loaded here, never weights.

        Raises:
            ConfigError: model or configuration are wrong.
            EngineStartError: the engine could not be built.
        """
        client = cls(config, command, progress)
        try:
            ready = await client._ready
            await asyncio.to_thread(client._load, ready)
        except BaseException:
            client._process.kill()
            await client._process.close(0)
            raise
        return client

    def _load(self, ready: wire.Ready) -> None:
        self._loaded = ready
        self._front_end = load_front_end(ready, self._config)

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._process.pid

    @property
    def ready(self) -> wire.Ready:
        """What the engine process told when its engine was built."""
        return self._loaded

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def limits(self) -> Limits:
        return self._loaded.limits

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._front_end.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        return self._front_end.chat_template

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return self._loaded.sampling_defaults

    @property
    def num_requests(self) -> int:
        """Requests in flight, as this side knows them."""
        return len(self._streams)

    def check(self, requests: Sequence[EngineRequest]) -> None:
        check(self._front_end.inputs, requests)

    async def submit(self, requests: Sequence[EngineRequest]) -> Stream:
        self.check_ready()
        stream = self._streams.open(requests)
        try:
            data = self._encode(requests)
            number, reply = self._expect_reply()
            self._process.send(wire.Submit(number, stream.keys, data))
            await reply
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def abort(self, request_id: str) -> None:
        key = self._streams.key(request_id)
        if key is not None:
            self._abort_keys([key])

    def snapshot(self) -> EngineSnapshot:
        return self._snapshot

    async def block_owners(self) -> tuple[int, ...]:
        return tuple(await self._call("block_owners"))

    def check_health(self) -> None:
        self._raise_if_dead()
        watchdog = self._config.server.watchdog
        silence = time.monotonic() - self._heard
        if max(silence, self._stalled_for) > watchdog:
            doing = "does not answer" if silence > watchdog else "has work, but finished no step"
            self._die(EngineDeadError(f"the engine {doing} for {watchdog:g} s"))
            self._process.kill()
            self._raise_if_dead()

    def check_ready(self) -> None:
        self.check_health()
        if self._draining:
            raise EngineDrainingError("the server is shutting down")

    async def reset_prefix_cache(self) -> int:
        return int(await self._call("reset_prefix_cache"))

    async def start_profile(self, directory: str) -> None:
        await self._call("start_profile", directory)

    async def stop_profile(self) -> None:
        await self._call("stop_profile")

    async def drain(self, timeout: float) -> None:
        self._draining = True
        await asyncio.gather(self._streams.drain(timeout), self._drain_engine(timeout))

    async def _drain_engine(self, timeout: float) -> None:
        """Waits for prompts that this engine computes for others."""
        if self._config.disaggregation.prefills:
            with contextlib.suppress(TimeoutError, EngineDeadError):
                await asyncio.wait_for(self._call("drain"), timeout)

    async def shutdown(self) -> None:
        """Ends the engine process; a step that hangs is killed after ``STOP_TIMEOUT`` seconds."""
        await self._stop(STOP_TIMEOUT)

    async def kill(self) -> None:
        """As ``shutdown``, but at once: the engine process is killed whatever it does."""
        self._process.kill()
        await self._stop(0)

    async def _stop(self, timeout: float) -> None:
        self._die(EngineDeadError("the engine was shut down"))
        self._process.send(wire.Stop())
        await self._process.close(timeout)

    # ---- messages

    def _on_messages(self, messages: list[wire.Message]) -> None:
        self._heard = time.monotonic()
        deltas: list[OutputDelta] = []
        for message in messages:
            match message:
                case wire.News():
                    deltas += message.deltas
                    if message.snapshot is not None:
                        self._note_snapshot(message.snapshot)
                case wire.Beat():
                    self._stalled_for = message.stalled_for
                case wire.Reply():
                    self._settle(message)
                case wire.Progress():
                    if self._progress is not None:
                        self._progress(message.what, message.done, message.total)
                case wire.Ready():
                    if not self._ready.done():
                        self._ready.set_result(message)
                case wire.Failed():
                    self._fail(message)
        if deltas:
            self._stalled_for = 0.0
            self._streams.deliver(deltas)

    def _note_snapshot(self, snapshot: EngineSnapshot) -> None:
        steps = (*self._snapshot.steps, *snapshot.steps)[-MAX_STEP_RECORDS:]
        self._snapshot = replace(snapshot, steps=steps)

    def _settle(self, reply: wire.Reply) -> None:
        future = self._replies.pop(reply.number, None)
        if future is not None and not future.done():
            if reply.failure is None:
                future.set_result(reply.value)
            else:
                future.set_exception(reply.failure.error())

    def _fail(self, message: wire.Failed) -> None:
        if not self._ready.done():
            kind = ConfigError if message.user_error else EngineStartError
            self._ready.set_exception(kind(message.message))
        else:
            self._die(EngineDeadError(message.message))

    def _on_exit(self) -> None:
        status = self._process.status
        how = "" if status is None else f" with status {status}"
        if not self._ready.done():
            self._ready.set_exception(EngineStartError(f"the engine process ended{how} before it was ready"))
        self._die(EngineDeadError(f"the engine process ended{how}"))

    def _die(self, error: EngineDeadError) -> None:
        """The first reason counts: open streams and whoever waits for a reply get it."""
        if self._error is not None:
            return
        self._error = error
        for future in self._replies.values():
            if not future.done():
                future.set_exception(EngineDeadError(str(error)))
        self._replies.clear()
        self._streams.end(error)

    # ---- commands

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise EngineDeadError(str(self._error)) from self._error

    def _encode(self, requests: Sequence[EngineRequest]) -> msgspec.Raw:
        try:
            return wire.encode_requests(requests)
        except OverflowError:  # an integer of more than 64 bits, which is no token id
            self.check(requests)
            raise

    def _expect_reply(self) -> tuple[int, "asyncio.Future[Any]"]:
        number = next(self._numbers)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        reply.add_done_callback(lambda _: self._replies.pop(number, None))
        return number, reply

    async def _call(self, operation: wire.Operation, argument: str = "") -> Any:
        self._raise_if_dead()
        number, reply = self._expect_reply()
        self._process.send(wire.Call(number, operation, argument))
        return await reply

    def _abort_keys(self, keys: Sequence[str]) -> None:
        if self._error is None:
            self._process.send(wire.Abort(tuple(keys)))
