"""What happens to every HTTP call, as plain ASGI: request ids, API keys, body limit, counting."""

import hashlib
import hmac
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.context import Metrics
from serve.errors import APIError, as_api_error, bad_request

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/openapi.json", "/dashboard"})
"""Need no API key: what probes and scrapers call, and pages without data."""
MAX_REQUEST_ID = 256
CLIENT_LEFT = 499
"""Status of calls whose client left before its answer began; counted, but received by nobody."""


class RequestIds:
    """Outermost: echoes ``X-Request-Id`` or makes one, counts answers, and turns what nobody caught into a 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics, retry_after: int) -> None:
        self._app = app
        self._metrics = metrics
        self._retry_after = retry_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id")
        shown = given or uuid.uuid4().hex
        start = time.monotonic()
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if not refused:
                    MutableHeaders(scope=message)["x-request-id"] = shown
            await send(message)

        refused = not _is_printable(shown)
        try:
            if refused:
                problem = f"X-Request-Id must be 1 to {MAX_REQUEST_ID} printable characters"
                await bad_request(problem, "X-Request-Id").response()(scope, receive, tagged)
            else:
                await self._app(scope, receive, tagged)
        except Exception as error:
            answer = as_api_error(error, self._retry_after)
            if status:
                raise
            await answer.response()(scope, receive, tagged)
        finally:
            route = scope.get("route")
            pattern = "unmatched" if route is None else route.path
            seconds = time.monotonic() - start
            self._metrics.http_answer(scope["method"], pattern, status or CLIENT_LEFT, seconds)


def _is_printable(text: str) -> bool:
    return len(text) <= MAX_REQUEST_ID and all(" " <= c != "\x7f" for c in text)


class APIKeys:
    """Lets only calls with one of the bearer tokens through, except to ``OPEN_PATHS``."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._admits(scope):
            await self._app(scope, receive, send)
            return
        response = APIError(401, "the API key is missing or wrong: send Authorization: Bearer KEY").response()
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        """Looks at all keys, and at all of each, so that the time tells nothing."""
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(token.strip().encode("latin-1", "replace"))
        found = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(found) and scheme.lower() == "bearer"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class BodyLimit:
    """Refuses longer bodies with 413: by their declared length without reading them, and otherwise as soon as they
    are too long. The connection is closed, so the rest is not read either."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        too_long = APIError(413, f"the body is longer than {self._max_bytes} bytes")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            await too_long.response()(scope, receive, send)
            return
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                if size > self._max_bytes:
                    raise too_long
            return message

        await self._app(scope, limited, send)
