"""What a long prompt does to streams that decode: the worst gap between their tokens while it is computed."""

import asyncio
import statistics
import time
from dataclasses import dataclass

import uvloop

from benchmarks.workloads import prompt_ids
from serve.bench.datasets import BenchRequest
from serve.bench.load import PATHS, RequestShape
from serve.bench.records import RequestRecord, StreamReader
from serve.bench.stream_client import StreamClient


@dataclass(frozen=True)
class Interruption:
    """Streams that decode, and the prompt that arrives meanwhile.

    Attributes:
        streams, stream_prompt: how many, and the length of their prompts.
        stream_tokens: most tokens of a stream; it is left when the prompt is done.
        long_prompt: tokens of the prompt.
        chunks_before: chunks that every stream must have got when the prompt is sent.
    """

    streams: int = 8
    stream_prompt: int = 32
    stream_tokens: int = 500
    long_prompt: int = 1500
    chunks_before: int = 20


@dataclass(frozen=True)
class Gaps:
    """Seconds.

    Attributes:
        worst: longest gap of any stream while the long prompt was computed.
        usual: median gap before.
        ttft: of the long prompt.
    """

    worst: float
    usual: float
    ttft: float


def measure(url: str, model: str, case: Interruption, ids: range, seed: int) -> Gaps:
    """One round; prompts of different seeds share no prefix.

    Raises:
        RuntimeError: a request failed, or a stream ended before the prompt was computed.
    """
    return uvloop.run(_Round(url, model, case, ids, seed).run())


class _Round:
    def __init__(self, url: str, model: str, case: Interruption, ids: range, seed: int) -> None:
        self._client = StreamClient(url)
        self._shape = RequestShape(model, ignore_eos=True, extra={"temperature": 0})
        self._case, self._ids, self._seed = case, ids, seed

    async def run(self) -> Gaps:
        case = self._case
        records = [RequestRecord(0.0) for _ in range(case.streams)]
        streams = [
            asyncio.create_task(self._send(record, case.stream_prompt, case.stream_tokens, index))
            for index, record in enumerate(records)
        ]
        try:
            while any(len(record.times) < case.chunks_before for record in records):
                _check(records)
                await asyncio.sleep(0.001)
            prompt = RequestRecord(0.0)
            await self._send(prompt, case.long_prompt, 1, case.streams)
            _check([*records, prompt], unfinished=records)
            while any(record.times[-1] < prompt.times[0] for record in records):
                _check(records)  # the gap that is open when the prompt is done has an end, too
                await asyncio.sleep(0.001)
        finally:
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            self._client.close()
        return _gaps(records, prompt)

    async def _send(self, record: RequestRecord, length: int, output: int, index: int) -> None:
        ids = prompt_ids(length, 1000 * self._seed + index, self._ids.start, self._ids.stop)
        body = self._shape.body(BenchRequest(ids, length, output))
        reader = StreamReader(record, 0.0, keep_text=False)
        record.sent = time.perf_counter()
        answer = await self._client.post(PATHS[self._shape.endpoint], body, reader.on_event)
        if answer.status != 200:
            record.error = f"HTTP {answer.status}: {answer.body.decode('utf-8', 'replace')[:300]}"


def _check(records: list[RequestRecord], unfinished: list[RequestRecord] | None = None) -> None:
    for record in records:
        if record.error is not None:
            raise RuntimeError(f"a request failed: {record.error}")
    if any(record.finish_reason is not None for record in (records if unfinished is None else unfinished)):
        raise RuntimeError("a stream ended before the long prompt was computed: give the streams more tokens")


def _gaps(records: list[RequestRecord], prompt: RequestRecord) -> Gaps:
    begin, end = prompt.sent, prompt.times[0]
    pairs = [pair for record in records for pair in zip(record.times, record.times[1:])]
    usual = [after - before for before, after in pairs if after <= begin]
    worst = max(after - before for before, after in pairs if after > begin and before < end)
    return Gaps(worst, statistics.median(usual), prompt.ttft)
