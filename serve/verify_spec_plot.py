"""The picture of ``jaxinfer verify-spec``: how far laws are off, and p-values, against their limits."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxinfer.speculative.check.matrix import SIGNIFICANT, TOLERANCE, Finding
from serve.verify_spec_model import Comparison

matplotlib.use("Agg")

LEAST = 1e-18
"""Differences of zero are drawn here."""


def plot_results(results: Sequence[Finding | Comparison], path: Path) -> None:
    """Writes a PNG with two panels: differences of exact laws, and p-values of sampled ones."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    exact, sampled = figure.subplots(1, 2, width_ratios=(3, 1))
    laws = [(r, r.difference) for r in results if isinstance(r, Finding) and r.difference is not None]
    tests = [(r, r.p_value) for r in results if r.p_value is not None]
    _points(exact, laws, TOLERANCE)
    exact.set(xlabel="largest difference of two probabilities", title="exact laws")
    _points(sampled, tests, SIGNIFICANT)
    sampled.set(xlabel="p-value, corrected", title="samples")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")


def _points(axis: Axes, values: Sequence[tuple[Finding | Comparison, float]], limit: float) -> None:
    names = [f"{result.rule}, {result.drafts}" for result, _ in values]
    rows = {name: i for i, name in enumerate(dict.fromkeys(names))}
    for name, (result, value) in zip(names, values):
        axis.plot(max(value, LEAST), rows[name], "o" if result.holds else "rx", alpha=0.7)
    axis.axvline(limit, color="tab:red", linestyle="--", label="limit")
    axis.set(xscale="log", yticks=range(len(rows)), yticklabels=list(rows))
    axis.grid(alpha=0.3)
    axis.legend()
