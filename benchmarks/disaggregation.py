"""Gaps between tokens of running decodes while long prompts arrive: alone, in one engine, and with a prefill engine.

``python -m benchmarks.disaggregation --config configs/smollm2-135m.yaml`` starts the servers, each on a core of its
own, one after the other, and prints a table. Gaps are what a client sees between two events of a stream.
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
    streams, tokens: running decodes, and tokens of each.
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
def server(config: str, core: int, options: dict[str, object]) -> Iterator[str]:
    """A server that uses one core; yields its URL."""
    given = [f"--{name}={value}" for name, value in {"server.port": 0, **options}.items()]
    process = subprocess.Popen(
        [sys.executable, "-c", START, "serve", "--config", config, *given],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            found = re.search(r"at (http://\S+)", line)
            if found:
                break
            sys.stderr.write(line)
        else:
            raise RuntimeError("the server did not start")
        os.set_blocking(process.stderr.fileno(), False)
        yield found[1]
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def decode(client: httpx.AsyncClient, seed: int, load: Load, started: asyncio.Event) -> list[float]:
    """Times of a stream's tokens."""
    body = {
        "prompt": load.random_ids(12, seed),
        "max_tokens": load.tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    times: list[float] = []
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                times.append(time.perf_counter())
                if len(times) == 8:
                    started.set()
    return times


async def measure(url: str, load: Load, with_prompts: bool) -> tuple[np.ndarray, list[float]]:
    """Gaps between tokens in milliseconds, from when all decodes run until the first of them ends; and the seconds
    until the long prompts had their first token."""
    async with httpx.AsyncClient(base_url=url, timeout=1200) as client:
        await client.post("/v1/completions", json={"prompt": load.random_ids(40, 9), "max_tokens": 4})
        events = [asyncio.Event() for _ in range(load.streams)]
        tasks = [asyncio.create_task(decode(client, i, load, event)) for i, event in enumerate(events)]
        for event in events:
            await event.wait()
        begin, first_tokens = time.perf_counter(), []
        if with_prompts:
            for i in range(load.prompts):
                asked = time.perf_counter()
                body = {
                    "prompt": load.random_ids(load.prompt_tokens, 100 + i),
                    "max_tokens": 1,
                    "temperature": 0,
                }
                (await client.post("/v1/completions", json=body)).raise_for_status()
                first_tokens.append(time.perf_counter() - asked)
        end = time.perf_counter()
        times = await asyncio.gather(*tasks)
    last = min(stream[-1] for stream in times)
    if with_prompts and end > last:
        print(
            f"the decodes ended before the last prompt: raise --tokens above {load.tokens}", file=sys.stderr
        )
    stop = min(end, last) if with_prompts else last
    gaps = [np.diff([t for t in stream if begin <= t <= stop]) for stream in times]
    return 1000 * np.concatenate(gaps), first_tokens


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/smollm2-135m.yaml")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--transport", default="host")
    parser.add_argument("--vocab", type=int, default=20_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], help="value of all servers: cache.memory=1GiB")
    options = parser.parse_args()
    load = Load(options.streams, options.tokens, options.prompts, options.prompt_tokens, options.vocab)
    values = dict(value.split("=", 1) for value in options.set)
    rows: dict[str, list[tuple[np.ndarray, list[float]]]] = {}
    with server(options.config, 0, values) as url:
        for name, prompts in (("no prompts", False), ("one engine", True)):
            rows[name] = [asyncio.run(measure(url, load, prompts)) for _ in range(options.runs)]
            asyncio.run(forget(url))
    address = free_address()
    common = {"disaggregation.transport": options.transport, "disaggregation.timeout": 600, **values}
    prefill = {"disaggregation.role": "prefill", "disaggregation.bind": address, **common}
    decoding = {"disaggregation.role": "decode", "disaggregation.peers": f"[{address}]", **common}
    with server(options.config, 1, prefill) as other, server(options.config, 0, decoding) as url:
        runs = []
        for _ in range(options.runs):
            runs.append(asyncio.run(measure(url, load, True)))
            asyncio.run(forget(url))
            asyncio.run(forget(other))
        rows["prefill engine"] = runs
    show(rows)


async def forget(url: str) -> None:
    """Long prompts of the next run must not be prefix hits."""
    async with httpx.AsyncClient(base_url=url) as client:
        (await client.post("/reset_prefix_cache")).raise_for_status()


def show(rows: dict[str, list[tuple[np.ndarray, list[float]]]]) -> None:
    """Medians over the runs."""
    table = Table("decodes with", "median gap ms", "p99 ms", "worst ms", "worst / alone", "TTFT of prompts s")
    alone = float(np.median([gaps.max() for gaps, _ in rows["no prompts"]]))
    for name, runs in rows.items():
        middle, high, worst = (
            float(np.median([np.percentile(gaps, q) for gaps, _ in runs])) for q in (50, 99, 100)
        )
        first = [seconds for _, of_run in runs for seconds in of_run]
        shown = f"{np.median(first):.2f}" if first else ""
        table.add_row(name, f"{middle:.1f}", f"{high:.1f}", f"{worst:.1f}", f"{worst / alone:.2f}", shown)
    Console().print(table)


if __name__ == "__main__":
    main()
