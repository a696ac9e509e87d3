"""Servers side by side: chat requests in a closed loop, the servers taking turns."""

import os
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
from server_child import free_port

REQUESTS = 20
MAX_TOKENS = 100
QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "Give me three tips for learning to cook.",
    "What is the difference between a list and a tuple in Python?",
    "Summarise the plot of Romeo and Juliet.",
    "How do vaccines work?",
    "Name five animals that live in the desert.",
    "What should I pack for a week in the mountains?",
    "Describe how a bicycle stays upright.",
)


@dataclass(frozen=True)
class Load:
    """One closed loop.

    Attributes:
        rate: output tokens per second, as the servers count them.
        latencies: seconds of each request.
    """

    rate: float
    latencies: list[float]

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[round(share * (len(ordered) - 1))]


def run_load(url: str, model: str, concurrency: int, requests: int, max_tokens: int, seed: int) -> Load:
    """Sends ``requests`` chat requests, ``concurrency`` at a time; questions of other seeds differ at their start."""

    def one(index: int) -> tuple[float, int]:
        text = f"({seed}-{index}) {QUESTIONS[index % len(QUESTIONS)]}"
        body = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        start = time.perf_counter()
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
        response.raise_for_status()
        return time.perf_counter() - start, response.json()["usage"]["completion_tokens"]

    start = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        results = list(pool.map(one, range(requests)))
    seconds = time.perf_counter() - start
    return Load(sum(tokens for _, tokens in results) / seconds, [latency for latency, _ in results])


@dataclass
class Server:
    """A server in a process group of its own, stopped by a signal between measurements."""

    label: str
    url: str
    model: str
    process: "subprocess.Popen[bytes]"

    @classmethod
    def start(cls, label: str, command: list[str], environment: dict[str, str], timeout: float) -> "Server":
        """``command`` may hold ``{port}``.

        Raises:
            RuntimeError: it did not get ready.
        """
        port = free_port()
        process = subprocess.Popen(
            [part.format(port=port) for part in command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        server = cls(label, f"http://127.0.0.1:{port}", "", process)
        end = time.monotonic() + timeout
        while time.monotonic() < end and process.poll() is None:
            try:
                models = httpx.get(f"{server.url}/v1/models", timeout=5.0)
                if models.status_code == 200:
                    server.model = models.json()["data"][0]["id"]
                    server.pause()
                    return server
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        server.stop()
        raise RuntimeError(f"{label}: the server did not start")

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            os.killpg(self.process.pid, signal.SIGCONT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def command(engine: str, python: str, model: str, dtype: str, slots: int) -> list[str] | None:
    """The command line of an engine's server; None if it has none. llama.cpp's ``python`` is its server's binary."""
    address = ["--host", "127.0.0.1", "--port", "{port}"]
    if engine == "jaxinfer":
        code = "from serve.cli import main; main()"
        weights, _, activations = dtype.partition(":")
        options = [
            "--model.weights",
            weights,
            "--model.activations",
            activations or "float",
            "--model.max_model_len",
            "2048",
            "--cache.memory",
            "1GiB",
        ]
        return [python, "-c", code, "serve", "--config", model, *options, "--server.port", "{port}"]
    if engine == "vllm":
        module = "vllm.entrypoints.openai.api_server"
        options = [
            "--dtype",
            dtype,
            "--max-model-len",
            "2048",
            "--max-num-seqs",
            "64",
            "--no-enable-prefix-caching",
        ]
        return [python, "-m", module, "--model", model, *options, *address]
    if engine == "transformers":
        serve = str(Path(python).parent / "transformers")
        return [serve, "serve", model, "--dtype", dtype, "--device", "cpu", "--continuous-batching", *address]
    if engine == "llama.cpp":
        options = ["-t", "2", "-tb", "2", "-np", str(slots), "-c", str(512 * slots), "--no-cache-prompt"]
        return [python, "-m", model, *options, *address]
    return None


def measure_servers(
    servers: list[Server], concurrencies: list[int], repetitions: int, requests: int, max_tokens: int
) -> dict[str, dict[int, list[Load]]]:
    """One warm-up and ``repetitions`` loads of each concurrency, the servers taking turns."""
    loads: dict[str, dict[int, list[Load]]] = {s.label: {c: [] for c in concurrencies} for s in servers}
    for concurrency in concurrencies:
        for repetition in range(repetitions + 1):
            for server in servers:
                server.resume()
                count = requests if repetition else concurrency
                try:
                    load = run_load(server.url, server.model, concurrency, count, max_tokens, repetition)
                except (httpx.HTTPError, KeyError) as error:
                    print(f"{server.label}, concurrency {concurrency}: {error!r}", file=sys.stderr)
                else:
                    if repetition:
                        loads[server.label][concurrency].append(load)
                server.pause()
    return loads


def cell(loads: list[Load]) -> str:
    """Medians of the rate, and of P50 and P95 of the latency."""
    if not loads:
        return "-"
    p50, p95 = (statistics.median(load.percentile(share) for load in loads) for share in (0.5, 0.95))
    return f"{statistics.median(load.rate for load in loads):.0f} ({p50:.2f} / {p95:.2f} s)"
