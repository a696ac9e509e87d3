"""A lean HTTP/1.1 client for event streams: the load generator must not be what is measured.

Bytes go from the socket through ``httptools`` to the events of the request without a task switch or a queue in between,
and carry the time at which the socket was read.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

OnEvent = Callable[[bytes, float], None]
"""Takes the data of one server-sent event, and the time (``time.perf_counter``) at which it arrived."""
MAX_ERROR_BYTES = 4096


@dataclass(frozen=True)
class Answer:
    """How a request ended.

    Attributes:
        status: HTTP status.
        body: of an answer that is no event stream; cut to ``MAX_ERROR_BYTES`` unless the status is 200.
    """

    status: int
    body: bytes


class StreamError(ConnectionError):
    """The connection failed, or ended before the answer was complete."""


class _Connection(asyncio.Protocol):
    """One connection; it carries one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self.reset(None)

    def reset(self, on_event: OnEvent | None) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._on_event = on_event
        self._is_stream = False
        self._keep_alive = False
        self._rest = b""
        self._body: list[bytes] = []
        self._now = 0.0
        self.answered = False
        self._done: asyncio.Future[Answer] | None = None

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and self._keep_alive

    async def request(self, head: bytes, body: bytes, on_event: OnEvent) -> Answer:
        self.reset(on_event)
        if self._transport is None or self._transport.is_closing():
            raise StreamError("the connection is closed")
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(head + body)
        return await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self.answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, ValueError) as error:
            self._fail(f"the answer cannot be read: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._keep_alive = False
        self._fail(f"the connection was closed before the end of the answer{f': {error}' if error else ''}")

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")

    def on_body(self, data: bytes) -> None:
        if not self._is_stream:
            self._body.append(data)
            return
        text = self._rest + data if self._rest else data
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *events, self._rest = text.split(b"\n\n")
        assert self._on_event is not None
        for event in events:
            content = event_data(event)
            if content:
                self._on_event(content, self._now)

    def on_message_complete(self) -> None:
        self._keep_alive = self._parser.should_keep_alive()
        status = self._parser.get_status_code()
        body = b"".join(self._body)
        if self._done is not None and not self._done.done():
            self._done.set_result(Answer(status, body if status == 200 else body[:MAX_ERROR_BYTES]))

    def _fail(self, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(StreamError(message))
            self.close()


def event_data(event: bytes) -> bytes:
    """The data of one event: its ``data:`` lines joined, without comments and other fields."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class StreamClient:
    """Sends JSON requests to one server and reads event streams; connections are kept and used again.

    Args:
        url: ``http://HOST:PORT`` or ``https://...``, perhaps with a path.
        headers: sent with every request.
        timeout: seconds for one request.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server; write for example http://127.0.0.1:8000")
        self._host, self._secure = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._path = parts.path.rstrip("/")
        fields = {"Host": parts.netloc, "Content-Type": "application/json", **(headers or {})}
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._timeout = timeout
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, on_event: OnEvent) -> Answer:
        """Sends one request. Events are handed to ``on_event`` while they arrive.

        Raises:
            StreamError: no connection, no answer in time, or one that broke off.
        """
        head = (
            f"POST {self._path}{path} HTTP/1.1\r\n{self._fields}Content-Length: {len(body)}\r\n\r\n".encode()
        )
        try:
            async with asyncio.timeout(self._timeout):
                return await self._send(head, body, on_event)
        except TimeoutError:
            raise StreamError(f"no complete answer within {self._timeout:g} s") from None

    async def _send(self, head: bytes, body: bytes, on_event: OnEvent) -> Answer:
        while self._idle:
            connection = self._idle.pop()
            if not connection.usable:
                continue
            try:
                return await self._use(connection, head, body, on_event)
            except StreamError:
                # A server may close an idle connection at any time: nothing was answered, so ask again.
                if connection.answered:
                    raise
        return await self._use(await self._connect(), head, body, on_event)

    async def _use(self, connection: _Connection, head: bytes, body: bytes, on_event: OnEvent) -> Answer:
        try:
            answer = await connection.request(head, body, on_event)
        except BaseException:
            connection.close()
            raise
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    async def _connect(self) -> _Connection:
        context = ssl.create_default_context() if self._secure else None
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=context)
        except OSError as error:
            raise StreamError(f"no connection to {self._host}:{self._port}: {error}") from None
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
