"""A real server for tests: uvicorn on a loopback port, in a thread, around an engine of the test."""

import asyncio
import contextlib
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx
import uvicorn

from jaxinfer.engine.build import Engine
from jaxinfer.engine.thread_client import ThreadClient
from serve.app import create_app
from tests.support import engines

T = TypeVar("T")
START_TIMEOUT = 60.0
REQUEST_TIMEOUT = 60.0


@dataclass(frozen=True)
class Server:
    """Attributes:
    url: without a slash at the end.
    client: for requests of the test.
    engine: what the server runs.
    engine_client: its client; use it on the server's event loop only, by ``call``.
    """

    url: str
    client: httpx.Client
    engine: Engine
    engine_client: ThreadClient
    loop: asyncio.AbstractEventLoop

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the server's event loop."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(REQUEST_TIMEOUT)


class _Server(uvicorn.Server):
    """Tells when it listens, and on which port."""

    def __init__(self, config: uvicorn.Config, ready: threading.Event) -> None:
        super().__init__(config)
        self._ready = ready
        self.port = 0

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.port = self.servers[0].sockets[0].getsockname()[1]
        self._ready.set()


@dataclass
class _Host:
    """The thread of a server and what it made."""

    engine: Engine
    ready: threading.Event = field(default_factory=threading.Event)
    server: _Server | None = None
    client: ThreadClient | None = None
    loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self.ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.client = ThreadClient(self.engine)
        app = create_app(self.client, self.engine.config)
        config = uvicorn.Config(
            app, host="127.0.0.1", port=0, log_level="warning", http="httptools", timeout_graceful_shutdown=1
        )
        self.server = _Server(config, self.ready)
        try:
            await self.server.serve()
        finally:
            await self.client.shutdown()


@contextlib.contextmanager
def running_server(engine: Engine, **server: Any) -> Iterator[Server]:
    """Serves an engine until the block is left.

    Args:
        server: fields of ``ServerConfig``; ``engine.config`` has the others.
    """
    settings = engine.config.server.model_copy(update=server)
    config = engine.config.model_copy(update={"server": settings})
    host = _Host(replace(engine, config=config))
    gc.collect()
    gc.freeze()  # as the real server does: a full collection over all of JAX stops every thread for long
    thread = threading.Thread(target=host.run, name="test-server", daemon=True)
    thread.start()
    assert host.ready.wait(START_TIMEOUT), "the server did not start"
    assert host.server is not None
    assert host.server.started, "the server ended at once; its log says why"
    assert host.client is not None
    assert host.loop is not None
    url = f"http://127.0.0.1:{host.server.port}"
    try:
        with httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT) as client:
            yield Server(url, client, host.engine, host.client, host.loop)
    finally:
        host.server.should_exit = True
        thread.join(START_TIMEOUT)
        gc.unfreeze()
        assert not thread.is_alive(), "the server did not stop"


def assert_idle(server: Server, seconds: float = 5.0) -> None:
    """Waits for the end of the steps that are in flight, and checks that nothing of any request is left."""
    deadline = time.monotonic() + seconds
    while server.engine.core.has_work:
        assert time.monotonic() < deadline, "the engine still works"
        time.sleep(0.002)
    assert server.call(lambda: server.engine_client.num_requests) == 0
    engines.assert_clean(server.engine)


def sse_events(response: httpx.Response | str) -> list[Any]:
    """The data of all events: decoded JSON, and the string ``[DONE]``. Comments are left out."""
    text = response if isinstance(response, str) else response.read().decode()
    events: list[Any] = []
    for block in text.split("\n\n"):
        data = [line.removeprefix("data: ") for line in block.split("\n") if line.startswith("data: ")]
        if data:
            joined = "\n".join(data)
            events.append(joined if joined == "[DONE]" else json.loads(joined))
    return events


@dataclass
class Folded:
    """A choice put together from a stream.

    Attributes:
        chunks: how many chunks had news of it.
        logprobs: the lists of all chunks joined, by name.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: Any = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    chunks: int = 0


@dataclass
class FoldedStream:
    """Attributes:
    choices: by index.
    usage: of the chunk without choices; None if there was none.
    error: the error object, if the stream told one.
    done: whether the stream ended with ``[DONE]``.
    """

    choices: dict[int, Folded] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False


def _fold(events: list[Any], add: Callable[[Folded, dict[str, Any]], None]) -> FoldedStream:
    result = FoldedStream(done=bool(events) and events[-1] == "[DONE]")
    for event in events:
        if event == "[DONE]":
            continue
        if "error" in event:
            assert result.error is None, "two errors in a stream"
            result.error = event["error"]
            continue
        if not event["choices"]:
            assert result.usage is None, "two chunks with usage"
            result.usage = event["usage"]
        for part in event["choices"]:
            choice = result.choices.setdefault(part["index"], Folded())
            assert choice.finish_reason is None, "news after the finish reason"
            choice.chunks += 1
            choice.finish_reason = part["finish_reason"]
            choice.stop_reason = part.get("stop_reason")
            choice.token_ids += part.get("token_ids", [])
            for name, values in (part.get("logprobs") or {}).items():
                choice.logprobs.setdefault(name, []).extend(values)
            add(choice, part)
    return result


def fold_completion(events: list[Any]) -> FoldedStream:
    """What a stream of ``/v1/completions`` adds up to."""

    def add(choice: Folded, part: dict[str, Any]) -> None:
        choice.text += part["text"]

    return _fold(events, add)


def fold_chat(events: list[Any]) -> FoldedStream:
    """What a stream of ``/v1/chat/completions`` adds up to."""

    def add(choice: Folded, part: dict[str, Any]) -> None:
        delta = part["delta"]
        choice.text += delta.get("content") or ""
        choice.reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or []:
            kept = choice.tool_calls.setdefault(call["index"], {"id": None, "name": "", "arguments": ""})
            kept["id"] = call.get("id") or kept["id"]
            kept["name"] += call["function"].get("name") or ""
            kept["arguments"] += call["function"].get("arguments") or ""

    return _fold(events, add)
