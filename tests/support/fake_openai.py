"""A server that speaks just enough of the OpenAI API to be measured, with delays that the test decides."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

METRICS = """# TYPE {p}:prefix_cache_queries counter
{p}:prefix_cache_queries_total{{engine="0"}} {queries}
{p}:prefix_cache_queries_total{{engine="1"}} 0
# TYPE {p}:prefix_cache_hits counter
{p}:prefix_cache_hits_total{{engine="0"}} {hits}
# TYPE {p}:num_preemptions counter
{p}:num_preemptions_total{{engine="0"}} {preemptions}
"""


@dataclass(frozen=True)
class Timing:
    """Seconds of one answer: until the first token, and between the others.

    Attributes:
        tokens_per_chunk: of each chunk but the first.
        fail_with: HTTP status instead of an answer; ``fail_after``: chunks until an error event.
    """

    first: float = 0.0
    gaps: tuple[float, ...] = ()
    tokens_per_chunk: int = 1
    fail_with: int | None = None
    fail_after: int | None = None


@dataclass
class Seen:
    """One request as the server saw it: its body, when it came and when each chunk with output left."""

    body: dict[str, Any]
    headers: dict[str, str]
    at: float
    sent: list[float] = field(default_factory=list)


@dataclass
class FakeOpenAI:
    """An ASGI application. Every request of a load counts 10 prefix queries, 4 hits, and half a preemption.

    Attributes:
        timing: of the i-th request.
        seen: requests in the order of arrival.
    """

    timing: Callable[[int], Timing] = lambda index: Timing()
    prefix: str = "jaxinfer"
    seen: list[Seen] = field(default_factory=list)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"].startswith("/v1/") and scope["method"] == "POST":
            await self._generate(scope, receive, send)
            return
        count = len(self.seen)
        metrics = METRICS.format(p=self.prefix, queries=10 * count, hits=4 * count, preemptions=count // 2)
        answers = {
            "/v1/models": json.dumps({"data": [{"id": "fake"}]}),
            "/tokenizer_info": json.dumps({"vocab_size": 1000}),
            "/metrics": metrics,
        }
        if scope["path"] in ("/tokenize", "/detokenize"):
            body = json.loads(await _body(receive))
            words = body.get("prompt", "").split()
            text = " ".join(map(str, body.get("tokens", [])))
            answers[scope["path"]] = json.dumps({"count": len(words), "prompt": text})
        answer = answers.get(scope["path"])
        await _respond(send, 404 if answer is None else 200, (answer or "{}").encode())

    async def _generate(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = json.loads(await _body(receive))
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        seen = Seen(body, headers, time.perf_counter())
        timing = self.timing(len(self.seen))
        self.seen.append(seen)
        if timing.fail_with is not None:
            await _respond(send, timing.fail_with, b'{"error": {"message": "too busy"}}')
            return
        chat = scope["path"] == "/v1/chat/completions"
        await _start(send, 200, b"text/event-stream")
        if chat:
            await _event(send, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for i, delay in enumerate((timing.first, *timing.gaps)):
            await asyncio.sleep(delay)
            if i == timing.fail_after:
                await _event(send, {"error": {"message": "engine died", "code": 500}})
                break
            seen.sent.append(time.perf_counter())
            piece = {"delta": {"content": "x"}} if chat else {"text": "x"}
            await _event(send, {"choices": [{"index": 0, **piece, "finish_reason": None}]})
        else:
            end = {"delta": {}} if chat else {"text": ""}
            await _event(send, {"choices": [{"index": 0, **end, "finish_reason": "length"}]})
            tokens = 1 + timing.tokens_per_chunk * len(timing.gaps)
            usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
            await _event(
                send, {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 4}}}
            )
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def _start(send: Any, status: int, kind: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})


async def _respond(send: Any, status: int, body: bytes) -> None:
    await _start(send, status, b"application/json")
    await send({"type": "http.response.body", "body": body})


async def _event(send: Any, content: dict[str, Any]) -> None:
    data = b": a comment\n\ndata: " + json.dumps(content).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


@contextmanager
def fake_openai(app: FakeOpenAI) -> Iterator[str]:
    """Serves the application on a free port of the loopback address; yields its address."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="error", lifespan="off", access_log=False
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
