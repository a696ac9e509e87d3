"""Sends a load and records what comes back."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from serve.bench.datasets import BenchRequest
from serve.bench.records import RequestRecord, StreamReader
from serve.bench.stream_client import StreamClient, StreamError

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
OnFinish = Callable[[RequestRecord], None]


@dataclass(frozen=True)
class RequestShape:
    """What every request of a load has in common.

    Attributes:
        extra: further fields of the body, sampling parameters for example.
        ignore_eos: generate all tokens that are asked for.
    """

    model: str
    endpoint: Endpoint = "completions"
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, request: BenchRequest) -> bytes:
        fields: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": request.prompt}]
            fields["max_completion_tokens"] = request.output_len
        else:
            fields["prompt"] = request.prompt
            fields["max_tokens"] = request.output_len
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode({**fields, **self.extra})


@dataclass(frozen=True)
class Arrival:
    """A request and when it is sent, in seconds after the start."""

    at: float
    request: BenchRequest


class LoadGenerator:
    """Sends requests to one endpoint.

    Args:
        keep_text: records hold the generated text.
    """

    def __init__(self, client: StreamClient, shape: RequestShape, keep_text: bool = False) -> None:
        self._client, self._shape, self._keep_text = client, shape, keep_text

    async def run(
        self,
        arrivals: Sequence[Arrival],
        max_concurrency: int | None = None,
        on_finish: OnFinish = lambda record: None,
    ) -> list[RequestRecord]:
        """Sends every request at its time; the records are in the order of the arrivals.

        Args:
            max_concurrency: at most so many at a time; the others wait, in order. With arrivals at 0 this is a
                closed loop.
            on_finish: called with each finished record.
        """
        places = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        # Bodies are made before the clock starts.
        bodies = [self._shape.body(arrival.request) for arrival in arrivals]
        tasks: list[asyncio.Task[RequestRecord]] = []
        origin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for arrival, body in zip(arrivals, bodies):
                delay = origin + arrival.at - time.perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                record = RequestRecord(arrival.at, arrival.request.prompt_len)
                tasks.append(group.create_task(self._one(record, body, origin, places, on_finish)))
        return [task.result() for task in tasks]

    async def _one(
        self,
        record: RequestRecord,
        body: bytes,
        origin: float,
        places: asyncio.Semaphore | None,
        on_finish: OnFinish,
    ) -> RequestRecord:
        if places is not None:
            await places.acquire()
        try:
            await self._send(record, body, origin)
        finally:
            if places is not None:
                places.release()
        on_finish(record)
        return record

    async def _send(self, record: RequestRecord, body: bytes, origin: float) -> None:
        reader = StreamReader(record, origin, self._keep_text)
        record.sent = time.perf_counter() - origin
        try:
            answer = await self._client.post(PATHS[self._shape.endpoint], body, reader.on_event)
        except StreamError as error:
            record.error = record.error or str(error)
            return
        if answer.status != 200:
            record.error = f"HTTP {answer.status}: {answer.body.decode('utf-8', 'replace')[:500]}"
        elif record.error is None and answer.body:
            record.error = "the answer is no event stream"
        elif record.error is None and record.finish_reason is None:
            record.error = "the stream ended without a finish reason"
