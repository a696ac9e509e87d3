"""The picture of a load: how long requests took, how fast tokens came, and what ran when."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from serve.bench.records import RequestRecord
from serve.bench.report import METRICS, Summary, concurrency

matplotlib.use("Agg")


def plot_load(summary: Summary, records: Sequence[RequestRecord], path: Path, title: str) -> None:
    """Writes a PNG with four panels: latency distributions, output tokens per second, requests in flight, and the
    timeline of every request (waiting for a place, for the first token, and generating)."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    done = [record for record in records if record.ok]
    _distributions(axes[0, 0], summary)
    _rate(axes[0, 1], summary)
    _in_flight(axes[1, 0], done)
    _timeline(axes[1, 1], done)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")


def _distributions(axis: Axes, summary: Summary) -> None:
    for name in METRICS:
        values = np.sort(summary.samples[name])
        if values.size:
            axis.step(values, np.arange(1, values.size + 1) / values.size, where="post", label=name.upper())
    axis.set(
        xlabel="milliseconds", ylabel="share", title="latency distributions", xscale="log", ylim=(0, 1.02)
    )
    if axis.get_legend_handles_labels()[0]:
        axis.legend()
    axis.grid(alpha=0.3)


def _rate(axis: Axes, summary: Summary) -> None:
    rate = summary.tokens_per_second
    axis.bar(np.arange(rate.size) + 0.5, rate, width=1.0, color="tab:blue", alpha=0.7)
    axis.set(xlabel="seconds", ylabel="tokens/s", title="output tokens per second")


def _in_flight(axis: Axes, records: Sequence[RequestRecord]) -> None:
    times, counts = concurrency(records)
    axis.step(times, counts, where="post", color="tab:green")
    axis.set(xlabel="seconds", ylabel="requests", title="requests in flight", ylim=(0, None))


def _timeline(axis: Axes, records: Sequence[RequestRecord]) -> None:
    phases = [
        ("waiting for a place", "tab:gray", [(r.due, r.sent) for r in records]),
        ("to the first token", "tab:orange", [(r.sent, r.times[0]) for r in records]),
        ("generating", "tab:blue", [(r.times[0], r.ended) for r in records]),
    ]
    for label, color, spans in phases:
        rows = np.arange(len(spans))
        starts, ends = np.array(spans, float).reshape(-1, 2).T
        axis.barh(rows, ends - starts, left=starts, height=1.0, color=color, label=label)
    axis.set(xlabel="seconds", ylabel="request", title="timeline")
    axis.invert_yaxis()
    axis.legend(loc="upper right")
