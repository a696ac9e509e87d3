"""Results as tables for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from serve.bench.report import METRICS

_ROWS = [
    ("Successful requests", "completed", "{:d}"),
    ("Failed requests", "failed", "{:d}"),
    ("Benchmark duration (s)", "duration", "{:.2f}"),
    ("Total input tokens", "total_input_tokens", "{:d}"),
    ("Total generated tokens", "total_output_tokens", "{:d}"),
    ("Request throughput (req/s)", "request_throughput", "{:.2f}"),
    ("Request goodput (req/s)", "request_goodput", "{:.2f}"),
    ("Output token throughput (tok/s)", "output_throughput", "{:.2f}"),
    ("Peak output token throughput (tok/s)", "max_output_tokens_per_s", "{:.0f}"),
    ("Total token throughput (tok/s)", "total_token_throughput", "{:.2f}"),
    ("Peak concurrent requests", "max_concurrent_requests", "{:d}"),
    ("Prefix cache hit rate", "prefix_cache_hit_rate", "{:.1%}"),
    ("Preemptions", "preemptions", "{:.0f}"),
    ("Load generator lag, worst (s)", "load_generator_lag_s", "{:.4f}"),
]


def print_result(
    console: Console, result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]
) -> None:
    """Totals, latencies, and what failed."""
    totals = Table(title="Serving Benchmark Result", show_header=False)
    for label, key, form in _ROWS:
        if result.get(key) is not None:
            totals.add_row(label, form.format(result[key]))
    console.print(totals)
    if result["completed"]:
        console.print(_latencies(result, metrics, percentiles))
    for message, count in sorted(result["error_counts"].items(), key=lambda item: -item[1])[:10]:
        console.print(f"{count} failed: {message}", style="red", markup=False, highlight=False)


def _latencies(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> Table:
    table = Table("milliseconds", "mean", "median", *(f"P{p:g}" for p in percentiles))
    for metric in metrics:
        keys = ["mean", "median", *(f"p{p:g}" for p in percentiles)]
        cells = [f"{result[f'{key}_{metric}_ms']:.2f}" for key in keys]
        table.add_row(f"{METRICS[metric]} ({metric.upper()})", *cells)
    return table
