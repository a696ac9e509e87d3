"""This engine beside others on a CPU: single stream, prefill, many requests, and HTTP, with shares of the limits.

usage: python benchmarks/cpu_peers.py [--vllm-python PATH] [--openvino-python PATH] [--llama-python PATH]
           [--llama-server PATH] [--transformers-python PATH] [--repetitions 5] [--threads 2] [--skip-http]
       python benchmarks/cpu_peers.py --smoke

All engines are loaded once and stopped while another one runs; they take turns in every repetition. Peers that are not
named are left out. Writes a JSON file and a plot, and prints the tables last. ``--smoke`` measures an engine that does
nothing, to check the measuring itself.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from cpu_limits import Limits, measure_limits, quick_limits
from cpu_peers_http import MAX_TOKENS, REQUESTS, Load, Server, cell, command, measure_servers
from offline import MODEL, Worker, environment, hugging_face_copy, plot, print_table, run
from rich.console import Console
from rich.table import Table
from workloads import NAMES

HERE = Path(__file__).parent
START_SECONDS = 900.0


@dataclass(frozen=True)
class Entry:
    """An engine under measurement.

    Attributes:
        precision: what is asked of the engine as its dtype; for this engine see ``offline_worker``.
        serving_python: what its server is started with; None: it is measured without one.
    """

    label: str
    engine: str
    python: str
    model: str
    precision: str
    serving_python: str | None


def entries(arguments: argparse.Namespace, gguf: str, copy: str) -> list[Entry]:
    """The engines that were asked for."""
    if arguments.smoke:
        return [Entry(f"idle {i}", "idle", arguments.python, "none", "none", None) for i in (1, 2)]
    own = arguments.python
    found = [
        Entry("jaxinfer Q4_1", "jaxinfer", own, gguf, "stored", own),
        Entry("jaxinfer Q4_1, int8", "jaxinfer", own, gguf, "stored:int8", own),
        Entry("jaxinfer bf16", "jaxinfer", own, copy, "stored", own),
        Entry("jaxinfer bf16, bf16", "jaxinfer", own, copy, "stored:bfloat16", own),
    ]
    if arguments.xla:
        found.append(Entry("jaxinfer XLA", "jaxinfer", own, gguf, "float", own))
    if python := arguments.llama_python:
        found.append(Entry("llama.cpp Q4_1", "llama.cpp", python, gguf, "stored", arguments.llama_server))
    if python := arguments.vllm_python:
        found.append(Entry("vLLM bf16", "vllm", python, copy, "bfloat16", python))
    if python := arguments.openvino_python:
        found.append(Entry("OpenVINO Q4_1", "openvino", python, gguf, "auto", None))
    if python := arguments.transformers_python:
        found.append(Entry("transformers bf16", "transformers", python, copy, "bfloat16", python))
    return found


def model_files(arguments: argparse.Namespace, directory: Path) -> tuple[str, str, int, int]:
    """The GGUF file, its copy in bfloat16 for engines that do not read GGUF, bytes of the weights that a decoding step
    reads as they are stored, and how many they are."""
    if arguments.smoke:
        return "", "", 1 << 20, 1 << 20
    from jaxinfer.checkpoints.loader import num_bytes
    from jaxinfer.checkpoints.references import resolve_reference
    from jaxinfer.config import EngineConfig
    from jaxinfer.engine.model_setup import set_up_model

    path = resolve_reference(arguments.model)
    setup = set_up_model(EngineConfig.load(str(path)))
    copy = hugging_face_copy(directory, "bfloat16", arguments.model)
    held = [setup.parts.shapes[path] for path in setup.parts.packable]
    count = sum(struct.shape[0] * struct.shape[1] for struct in held)
    return str(path), copy, sum(map(num_bytes, held)), count


def measure_offline(
    found: list[Entry], repetitions: int, names: list[str]
) -> dict[str, dict[str, list[float]]]:
    """Rates by engine and workload. An engine that does not start is left out, with a message."""
    workers: list[Worker] = []
    try:
        for entry in found:
            try:
                workers.append(
                    Worker.start(entry.label, entry.python, entry.engine, entry.model, entry.precision)
                )
            except RuntimeError as error:
                print(f"{entry.label} is left out: {error}", flush=True)
        return run(workers, names, repetitions)
    finally:
        for worker in workers:
            worker.stop()


def measure_http(
    found: list[Entry], arguments: argparse.Namespace, tokens: int
) -> dict[str, dict[int, list[Load]]]:
    """Loads by engine and concurrency, of the engines that have a server."""
    servers: list[Server] = []
    try:
        for entry in found:
            if entry.serving_python is None:
                continue
            slots = max(arguments.concurrencies)
            line = command(entry.engine, entry.serving_python, entry.model, entry.precision, slots)
            try:
                variables = environment(entry.engine, entry.serving_python)
                servers.append(Server.start(entry.label, line, variables, START_SECONDS))
            except (RuntimeError, OSError) as error:
                print(f"{entry.label}: no server: {error}", flush=True)
        return measure_servers(servers, arguments.concurrencies, arguments.repetitions, REQUESTS, tokens)
    finally:
        for server in servers:
            server.stop()


def shares(
    rates: dict[str, list[float]], weight_bytes: int, weights: int, limits: Limits
) -> dict[str, float]:
    """Parts of the limits: bytes of weights per second in decoding, operations per second in prefill."""
    result = {}
    if decode := rates.get("single stream"):
        result["decode"] = statistics.median(decode) * weight_bytes / limits.read
    if prefill := rates.get("prefill 1024"):
        result["prefill"] = statistics.median(prefill) * 2 * weights / limits.products
    return result


def print_http(console: Console, loads: dict[str, dict[int, list[Load]]]) -> None:
    concurrencies = sorted({c for by_level in loads.values() for c in by_level})
    columns = (f"c = {c}: tok/s (P50 / P95)" for c in concurrencies)
    table = Table("server", *columns, title=f"{REQUESTS} chat requests, {MAX_TOKENS} tokens each: medians")
    for label, by_level in loads.items():
        table.add_row(label, *(cell(by_level[c]) for c in concurrencies))
    console.print(table)


def print_shares(console: Console, found: dict[str, dict[str, float]], limits: Limits) -> None:
    title = f"limits: read {limits.read / 1e9:.1f} GB/s, square products {limits.products / 1e9:.0f} GFLOP/s"
    table = Table("engine", "decode, share of the read", "prefill, share of the products", title=title)
    for label, share in found.items():
        table.add_row(label, *(f"{share[n]:.0%}" if n in share else "-" for n in ("decode", "prefill")))
    console.print(table)


def processor() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL, help="a GGUF file, as a model reference")
    for peer in ("vllm", "openvino", "llama", "transformers"):
        parser.add_argument(f"--{peer}-python", help="Python of an environment that has this peer")
    parser.add_argument(
        "--llama-server", help="llama.cpp's server; without it llama.cpp is not measured over HTTP"
    )
    parser.add_argument("--python", default=sys.executable, help="Python that runs this engine")
    parser.add_argument("--xla", action="store_true", help="also this engine with expanded weights")
    parser.add_argument("--workloads", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--concurrencies", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="processors that all engines share")
    parser.add_argument("--skip-http", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--plot", type=Path, default=HERE.parent / "docs" / "images" / "cpu_peers.png")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    before = os.getloadavg()
    with tempfile.TemporaryDirectory() as directory:
        gguf, copy, weight_bytes, weights = model_files(arguments, Path(directory))
        limits = quick_limits() if arguments.smoke else measure_limits(weight_bytes, arguments.threads)
        found = entries(arguments, gguf, copy)
        rates = measure_offline(found, arguments.repetitions, arguments.workloads)
        skip = arguments.skip_http or arguments.smoke
        loads = {} if skip else measure_http(found, arguments, MAX_TOKENS)
    # Two bytes a weight, unless the engine reads the file's own blocks.
    sizes = {entry.label: weight_bytes if entry.model == gguf else 2 * weights for entry in found}
    share = {label: shares(rates[label], sizes[label], weights, limits) for label in rates}
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": processor(),
        "threads": arguments.threads,
        "load average before and after": [before, os.getloadavg()],
        "limits": asdict(limits),
        "rates": rates,
        "shares": share,
        "http": {k: {c: [asdict(x) for x in v] for c, v in level.items()} for k, level in loads.items()},
    }
    plot(rates, arguments.workloads, arguments.plot)
    arguments.plot.with_suffix(".json").write_text(json.dumps(record, indent=1))
    console = Console(width=160)
    console.print(
        f"{processor()}, {arguments.threads} threads, {time.strftime('%Y-%m-%d')}, load {before[0]:.1f}"
    )
    print_shares(console, share, limits)
    if loads:
        print_http(console, loads)
    print_table(rates, arguments.workloads)


if __name__ == "__main__":
    main()
