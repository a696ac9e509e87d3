"""What the server costs: streamed tokens per second through HTTP around a model whose step is 1 ms of nothing.

    python -m benchmarks.server_overhead [--streams 64] [--tokens 1000] [--profile DIRECTORY]

The load generator counts bytes and reads the number of tokens from each stream's last event, so that it takes as little
of the machine as it can. Times of processes tell where the rest goes.
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

MODES = ("process", "thread")


@dataclass(frozen=True)
class Result:
    """Attributes:
    seconds: from the first request to the end of the last stream.
    busy: processor seconds by process.
    """

    mode: str
    streams: int
    tokens: int
    events: int
    seconds: float
    busy: dict[str, float]


@dataclass
class Count(asyncio.Protocol):
    """One stream: sends its request, counts events, keeps the end (from the event with the usage on)."""

    request: bytes
    done: "asyncio.Future[None]"
    events: int = 0
    ending: bool = False
    tail: bytes = b""
    transport: asyncio.Transport | None = field(default=None, repr=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: ")
        if b"[DONE]" in data or b"usage" in data or self.ending:
            self.ending = True
            self.tail += data
            if b"data: [DONE]" in self.tail and not self.done.done():
                self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"the stream broke: {self.tail[-300:]!r}"))

    @property
    def tokens(self) -> int:
        start = self.tail.rindex(b'"usage":')
        return int(json.JSONDecoder().raw_decode(self.tail[start + 8 :].decode())[0]["completion_tokens"])


async def load(port: int, streams: int, tokens: int) -> tuple[int, int, float]:
    """Runs the streams at the same time; returns tokens, events and seconds."""
    body = json.dumps(
        {
            "prompt": "Count.",
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    request = f"{head}\r\n\r\n{body}".encode()
    loop = asyncio.get_running_loop()
    counts = [Count(request, loop.create_future()) for _ in range(streams)]
    begun = time.perf_counter()
    await asyncio.gather(*(loop.create_connection(lambda c=c: c, "127.0.0.1", port) for c in counts))
    await asyncio.gather(*(count.done for count in counts))
    seconds = time.perf_counter() - begun
    for count in counts:
        assert count.transport is not None
        count.transport.abort()
    return sum(count.tokens for count in counts), sum(count.events for count in counts), seconds


def measure(mode: str, streams: int, tokens: int, profile: str | None) -> Result:
    """Starts a server, warms it up, and measures it."""
    command = [sys.executable, "-m", "benchmarks.simulated_engine", "--serve", mode]
    if profile is not None:
        command[1:1] = ["-m", "cProfile", "-o", f"{profile}/{mode}.prof"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        port = _port(process)
        uvloop.run(load(port, streams, 50))
        before = _busy(process.pid)
        made, events, seconds = uvloop.run(load(port, streams, tokens))
        after = _busy(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    busy = {name: after[name] - before[name] for name in after}
    return Result(mode, streams, made, events, seconds, busy)


def _port(process: "subprocess.Popen[str]") -> int:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("serving "):
            return int(line.rsplit(":", 1)[1])
        print(line, end="", file=sys.stderr)
    raise RuntimeError("the server did not start")


def _busy(pid: int) -> dict[str, float]:
    server = psutil.Process(pid)
    named = {"server": server, "load generator": psutil.Process()}
    for child in server.children():
        named["engine"] = child
    return {name: sum(p.cpu_times()[:2]) for name, p in named.items()}


def show(results: Sequence[Result]) -> None:
    table = Table(
        "engine", "streams", "tokens/s", "events/s", "us per token of", title="server overhead, 1 ms steps"
    )
    for r in results:
        costs = ", ".join(f"{name} {1e6 * s / r.tokens:.0f}" for name, s in r.busy.items())
        rate, events = f"{r.tokens / r.seconds:,.0f}", f"{r.events / r.seconds:,.0f}"
        table.add_row(r.mode, str(r.streams), rate, events, costs)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--profile", metavar="DIRECTORY", help="cProfile of the server process")
    options = parser.parse_args()
    show([measure(mode, options.streams, options.tokens, options.profile) for mode in options.modes])


if __name__ == "__main__":
    main()
