"""Server-sent events straight through ASGI: one ``send`` for each event, and nothing of the framework in between."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.errors import APIError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: bytes) -> bytes:
    """A ``data:`` event."""
    return b"data: " + data + b"\n\n"


def openai_error_events(error: APIError) -> bytes:
    """How a stream of chat or completion chunks ends after an error."""
    return event(error.body()) + DONE


class ChunkEncoder:
    """Encodes the chunks of one stream: what all of them share is encoded once.

    Args:
        response_id, kind, model: ``id``, ``object`` and ``model`` of every chunk.
    """

    def __init__(self, response_id: str, kind: str, model: str) -> None:
        head = {"id": response_id, "object": kind, "created": int(time.time()), "model": model}
        self._head = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":'
        self._encoder = msgspec.json.Encoder()

    def chunk(
        self,
        choices: Sequence[msgspec.Struct],
        usage: msgspec.Struct | None = None,
        metrics: msgspec.Struct | None = None,
    ) -> bytes:
        """A whole event."""
        parts = [self._head, self._encoder.encode(choices)]
        if usage is not None:
            parts += [b',"usage":', self._encoder.encode(usage)]
        if metrics is not None:
            parts += [b',"metrics":', self._encoder.encode(metrics)]
        return b"".join([*parts, b"}\n\n"])

    def text(self, index: int, text: str) -> bytes:
        """The event of a completion choice that has new text and nothing else."""
        body = self._encoder.encode(text)
        return b'%b[{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}]}\n\n' % (
            self._head,
            index,
            body,
        )


class ClientDisconnectedError(Exception):
    """The client left before it had its answer; nobody will read one."""


class EventStream(Response):
    """Sends what ``events`` yields, each item as it is.

    The 200 goes out with the first event, so an error before it is a real HTTP error. When the client leaves,
    ``events`` is closed at once, wherever it waits.

    Args:
        events: framed events, the terminator included. It may raise.
        to_error: makes an ``APIError`` of what ``events`` raised.
        error_events: what ends the stream after an error.
        on_end: called when the answer is over, whichever way, also if ``events`` was never begun.
        keep_alive: seconds of silence after which a comment is sent; None for never.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        to_error: Callable[[Exception], APIError],
        on_end: Callable[[], Awaitable[None]],
        error_events: Callable[[APIError], bytes] = openai_error_events,
        keep_alive: float | None = None,
    ) -> None:
        super().__init__(media_type="text/event-stream")
        self._events = events
        self._to_error = to_error
        self._on_end = on_end
        self._error_events = error_events
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnectedError):
                await until_disconnect(receive, self._send_all(scope, receive, send))
        finally:
            await self._on_end()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def write(data: bytes) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": data, "more_body": True})

        events = self._events if self._keep_alive is None else _with_comments(self._events, self._keep_alive)
        try:
            async for data in events:
                await write(data)
        except Exception as error:
            await self._on_end()  # the client may be slow to take the news; the engine need not wait for that
            answer = self._to_error(error)
            if not started:
                await answer.response()(scope, receive, send)
                return
            await write(self._error_events(answer))
        finally:
            await events.aclose()
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled if the client leaves first.

    Raises:
        ClientDisconnectedError: it left.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        for pending in (task, watcher):
            if not pending.done():
                pending.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await pending


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _with_comments(events: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    """The same events, and a comment whenever none came for so long."""
    pending: asyncio.Future[bytes] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(_next(events))
            done, _ = await asyncio.wait((pending,), timeout=seconds)
            if not done:
                yield KEEP_ALIVE
                continue
            finished, pending = pending, None
            try:
                data = finished.result()
            except StopAsyncIteration:
                return
            yield data
    finally:
        if pending is not None:
            pending.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await pending


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)
