"""The server under load: throughput and latencies by concurrency, and what chunked prefill does for running streams.

usage: python -m benchmarks.serving [--url URL] [--config FILE] [--requests 20] [--max-tokens 100] [--skip-chunked]
Starts ``jaxinfer serve`` itself unless --url names a running server (then only the load by concurrency is measured).
Writes tables to stdout, and a plot and a JSON file with all numbers.
"""

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.prefill_gaps import Gaps, Interruption, measure
from benchmarks.server_child import server
from serve.bench.datasets import Lengths
from serve.bench.options import ArrivalOptions, DatasetOptions, ServeOptions
from serve.bench.serving import first_model, run_serving

ROOT = Path(__file__).parent.parent
LATENCIES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True)
class Setup:
    """What is measured.

    Attributes:
        prompt_len: tokens of the random prompts; greedy, EOS ignored.
        step_tokens: step budgets of the servers with and without chunked prefill.
        rounds: of the chunked prefill experiment, per server.
    """

    config: str
    concurrencies: tuple[int, ...]
    requests: int
    prompt_len: int
    max_tokens: int
    step_tokens: tuple[int, int]
    interruption: Interruption
    rounds: int
    overrides: dict[str, str]


def by_concurrency(url: str, setup: Setup) -> list[dict[str, Any]]:
    """One closed loop per concurrency; each has other prompts, so that the prefix cache does not help."""
    results = []
    for index, concurrency in enumerate(setup.concurrencies):
        dataset = DatasetOptions(
            count=setup.requests, lengths=Lengths(setup.prompt_len, setup.max_tokens), seed=index
        )
        options = ServeOptions(
            url=url,
            ignore_eos=True,
            warmups=min(concurrency, 2),
            extra={"temperature": 0},
            dataset=dataset,
            arrivals=ArrivalOptions(max_concurrency=concurrency),
        )
        result = run_serving(options)
        if result["failed"]:
            raise RuntimeError(f"{result['failed']} requests failed: {result['error_counts']}")
        results.append(result)
        print(f"concurrency {concurrency}: {result['output_throughput']:.1f} tok/s", flush=True)
    return results


def chunked_prefill(setup: Setup) -> dict[str, list[Gaps]]:
    """The same interruption with a step that holds a part of the long prompt, and with one that holds all of it."""
    small, large = setup.step_tokens
    return {name: _gaps(setup, tokens) for name, tokens in (("chunked", small), ("whole", large))}


def _gaps(setup: Setup, step_tokens: int) -> list[Gaps]:
    overrides = {
        "scheduler.max_num_seqs": 2 * setup.interruption.streams,
        **setup.overrides,
        "scheduler.max_num_batched_tokens": step_tokens,
    }
    with server(setup.config, overrides) as url, httpx.Client(base_url=url) as client:
        model = first_model(client)
        vocab_size = client.get("/tokenizer_info").json()["vocab_size"]
        ids = range(vocab_size // 20, vocab_size - vocab_size // 20)
        # The first round warms up.
        return [measure(url, model, setup.interruption, ids, seed) for seed in range(setup.rounds + 1)][1:]


def print_loads(console: Console, results: list[dict[str, Any]]) -> None:
    table = Table("concurrency", "tok/s", "times", *(f"{name.upper()} P50 / P95 (ms)" for name in LATENCIES))
    first = results[0]["output_throughput"]
    for result in results:
        latencies = (f"{result[f'p50_{name}_ms']:.0f} / {result[f'p95_{name}_ms']:.0f}" for name in LATENCIES)
        rate = result["output_throughput"]
        table.add_row(str(result["max_concurrency"]), f"{rate:.1f}", f"{rate / first:.2f}", *latencies)
    console.print(table)


def print_gaps(console: Console, gaps: dict[str, list[Gaps]]) -> None:
    table = Table("prefill", "worst gap (ms), per round", "usual gap (ms)", "TTFT of the prompt (ms)")
    for name, rounds in gaps.items():
        columns = zip(*((g.worst, g.usual, g.ttft) for g in rounds))
        table.add_row(name, *(" ".join(f"{1000 * value:.0f}" for value in column) for column in columns))
    console.print(table)
    console.print(f"ratio of the largest worst gaps: {gap_ratio(gaps):.3f}")


def gap_ratio(gaps: dict[str, list[Gaps]]) -> float:
    """Largest gap with chunks over the smallest worst gap without: the least favourable comparison."""
    return max(g.worst for g in gaps["chunked"]) / min(g.worst for g in gaps["whole"])


def plot(results: list[dict[str, Any]], gaps: dict[str, list[Gaps]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3 if gaps else 2, figsize=(13 if gaps else 9, 4), layout="constrained")
    at = [result["max_concurrency"] for result in results]
    axes[0].plot(at, [result["output_throughput"] for result in results], marker="o")
    axes[0].set(xlabel="concurrency", ylabel="output tok/s", title="throughput", ylim=(0, None), xticks=at)
    for name in ("ttft", "tpot"):
        for percentile, style in ((50, "-"), (95, "--")):
            values = [result[f"p{percentile}_{name}_ms"] for result in results]
            axes[1].plot(at, values, style, marker="o", label=f"{name.upper()} P{percentile}")
    axes[1].set(xlabel="concurrency", ylabel="milliseconds", title="latencies", yscale="log", xticks=at)
    axes[1].legend()
    if gaps:
        for position, rounds in enumerate(gaps.values()):
            values = [1000 * g.worst for g in rounds]
            axes[2].bar(position, max(values), width=0.5)
            axes[2].plot([position] * len(values), values, "k.")
            axes[2].text(position, max(values), f"{max(values):.0f}", ha="center", va="bottom")
        axes[2].set(xticks=range(len(gaps)), xticklabels=list(gaps), ylabel="milliseconds")
        axes[2].set(title="worst gap while a long prompt is computed")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="a running server; absent: one is started")
    parser.add_argument("--config", default=str(ROOT / "configs" / "smollm2-135m.yaml"))
    parser.add_argument("--concurrencies", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument(
        "--skip-chunked", action="store_true", help="leave the chunked prefill experiment out"
    )
    parser.add_argument("--step-tokens", type=int, nargs=2, default=[64, 2048], metavar=("SMALL", "LARGE"))
    parser.add_argument("--long-prompt", type=int, default=1500)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--stream-tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), dest="overrides"
    )
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "serving.png")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    setup = Setup(
        config=arguments.config,
        concurrencies=tuple(arguments.concurrencies),
        requests=arguments.requests,
        prompt_len=arguments.prompt_len,
        max_tokens=arguments.max_tokens,
        step_tokens=tuple(arguments.step_tokens),
        interruption=Interruption(
            streams=arguments.streams,
            stream_tokens=arguments.stream_tokens,
            long_prompt=arguments.long_prompt,
        ),
        rounds=arguments.rounds,
        overrides=dict(arguments.overrides),
    )
    if arguments.url:
        results, gaps = by_concurrency(arguments.url, setup), {}
    else:
        with server(setup.config, setup.overrides) as url:
            results = by_concurrency(url, setup)
        gaps = {} if arguments.skip_chunked else chunked_prefill(setup)
    console = Console(width=140)
    print_loads(console, results)
    if gaps:
        print_gaps(console, gaps)
    plot(results, gaps, arguments.plot)
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
        "setup": {**asdict(setup), "config": Path(setup.config).name},
        "loads": results,
        "gaps": {name: [asdict(g) for g in rounds] for name, rounds in gaps.items()},
    }
    arguments.plot.with_suffix(".json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
