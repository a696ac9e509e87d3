"""Gaps between tokens of running decodes while long prompts arrive: alone, in one engine, and with a prefill engine.

``python -m benchmarks.disaggregation --config configs/smollm2-135m.yaml`` starts the servers and prints a table. A
server has a core, and both of its processes share it; the client has that of the prefill engine. Gaps are what the
client sees between two events of a stream. Those without prompts are of the same decode engine, while its prefill
engine has nothing to do, and for the same time: the longest of more gaps is longer.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

START = "from serve.cli import main; main()"


@dataclass(frozen=True)
class Load:
    """Attributes:
    streams, tokens: running decodes, and most tokens of each; they are stopped when the time is over.
    prompts, prompt_tokens: long prompts that arrive one after the other while they run.
    vocab: prompts are random ids below it.
    """

    streams: int
    tokens: int
    prompts: int
    prompt_tokens: int
    vocab: int

    def random_ids(self, count: int, seed: int) -> list[int]:
        return np.random.default_rng(seed).integers(self.vocab // 20, self.vocab, count).tolist()


@contextlib.contextmanager
def server(config: str, core: int, options: dict[str, object]) -> Iterator["subprocess.Popen[str]"]:
    """A server that uses one core, and starts."""
    given = [f"--{name}={value}" for name, value in {"server.port": 0, **options}.items()]
    process = subprocess.Popen(
        [sys.executable, "-c", START, "serve", "--config", config, *given],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def url_of(process: "subprocess.Popen[str]") -> str:
    """Waits until a server listens."""
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"at (http://\S+)", line)
        if found:
            os.set_blocking(process.stderr.fileno(), False)
            return found[1]
        sys.stderr.write(line)
    raise RuntimeError("the server did not start")


@dataclass(frozen=True)
class Run:
    """Attributes:
    gaps: between two tokens of a stream, milliseconds, from when all decodes run.
    first_tokens: seconds until the long prompts had their first token.
    seconds: that this took.
    """

    gaps: np.ndarray
    first_tokens: tuple[float, ...]
    seconds: float


async def decode(
    client: httpx.AsyncClient, seed: int, load: Load, times: list[float], started: asyncio.Event
) -> None:
    """Notes the times of a stream's tokens."""
    body = {
        "prompt": load.random_ids(12, seed),
        "max_tokens": load.tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                times.append(time.perf_counter())
                if len(times) == 8:
                    started.set()


async def measure(url: str, load: Load, seconds: float | None = None) -> Run:
    """Args:
    seconds: None: as long as the prompts take; else without prompts, for so long.
    """
    async with httpx.AsyncClient(base_url=url, timeout=1200) as client:
        await client.post("/v1/completions", json={"prompt": load.random_ids(40, 9), "max_tokens": 4})
        events = [asyncio.Event() for _ in range(load.streams)]
        times: list[list[float]] = [[] for _ in events]
        tasks = [
            asyncio.create_task(decode(client, i, load, times[i], event)) for i, event in enumerate(events)
        ]
        for event in events:
            await event.wait()
        begin = time.perf_counter()
        asked = range(100, 100 + load.prompts) if seconds is None else ()
        first_tokens = [
            await _first_token(client, load.random_ids(load.prompt_tokens, seed)) for seed in asked
        ]
        if seconds is not None:
            await asyncio.sleep(seconds)
        end = time.perf_counter()
        if any(task.done() for task in tasks):
            print(f"a decode ended too early: raise --tokens above {load.tokens}", file=sys.stderr)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    gaps = [np.diff([t for t in stream if begin <= t <= end]) for stream in times]
    return Run(1000 * np.concatenate(gaps), tuple(first_tokens), end - begin)


async def _first_token(client: httpx.AsyncClient, prompt: list[int]) -> float:
    asked = time.perf_counter()
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    (await client.post("/v1/completions", json=body)).raise_for_status()
    return time.perf_counter() - asked


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/smollm2-135m.yaml")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1900)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--transport", default="host")
    parser.add_argument("--vocab", type=int, default=20_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--one-engine", action="store_true", help="also an engine that computes the prompts itself"
    )
    parser.add_argument("--set", action="append", default=[], help="value of all servers: cache.memory=1GiB")
    options = parser.parse_args()
    load = Load(options.streams, options.tokens, options.prompts, options.prompt_tokens, options.vocab)
    values = dict(value.split("=", 1) for value in options.set)
    address = free_address()
    common = {"disaggregation.transport": options.transport, "disaggregation.timeout": 600, **values}
    prefill = {"disaggregation.role": "prefill", "disaggregation.bind": address, **common}
    decoding = {"disaggregation.role": "decode", "disaggregation.peers": f"[{address}]", **common}
    os.sched_setaffinity(0, {1})
    rows: dict[str, list[Run]] = {"no prompts": [], "prefill engine": []}
    with server(options.config, 1, prefill) as there, server(options.config, 0, decoding) as here:
        other, url = url_of(there), url_of(here)
        for _ in range(options.runs):
            rows["prefill engine"].append(asyncio.run(measure(url, load)))
            rows["no prompts"].append(asyncio.run(measure(url, load, rows["prefill engine"][-1].seconds)))
            asyncio.run(forget(url))
            asyncio.run(forget(other))
    if options.one_engine:
        with server(options.config, 0, values) as alone:
            url, rows["one engine"] = url_of(alone), []
            for _ in range(options.runs):
                rows["one engine"].append(asyncio.run(measure(url, load)))
                asyncio.run(forget(url))
    show(rows)


async def forget(url: str) -> None:
    """Long prompts of the next run must not be prefix hits."""
    async with httpx.AsyncClient(base_url=url) as client:
        (await client.post("/reset_prefix_cache")).raise_for_status()


def show(rows: dict[str, list[Run]]) -> None:
    """Medians over the runs, and the longest gap of each run."""
    table = Table(
        "decodes with",
        "median gap ms",
        "p99 ms",
        "longest ms",
        "longest / alone",
        "of each run",
        "TTFT of prompts s",
    )
    alone = float(np.median([run.gaps.max() for run in rows["no prompts"]]))
    for name, runs in rows.items():
        middle, high, longest = (
            float(np.median([np.percentile(run.gaps, q) for run in runs])) for q in (50, 99, 100)
        )
        each = ", ".join(f"{run.gaps.max():.0f}" for run in runs)
        first = [seconds for run in runs for seconds in run.first_tokens]
        shown = f"{np.median(first):.2f}" if first else ""
        numbers = (f"{middle:.1f}", f"{high:.1f}", f"{longest:.1f}", f"{longest / alone:.2f}")
        table.add_row(name, *numbers, each, shown)
    Console().print(table)


if __name__ == "__main__":
    main()
