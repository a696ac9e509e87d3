"""The picture of a training run: loss, and acceptance per position."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def plot_run(records: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Writes a PNG: the loss of each step with its running mean, and the acceptance measured on held-out text."""
    from matplotlib.figure import Figure  # 1 s, and only the end of a run needs it

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [r["step"] for r in records if "loss" in r]
    losses = np.array([r["loss"] for r in records if "loss" in r])
    left.plot(steps, losses, color="tab:blue", alpha=0.3, label="each step")
    window = min(len(losses), 20)
    if window > 1:
        means = np.convolve(losses, np.ones(window) / window, "valid")
        left.plot(steps[window - 1 :], means, color="tab:blue", label=f"mean of {window}")
    left.set(xlabel="step", ylabel="loss", title="training loss")
    left.legend()
    measured = [r for r in records if "mean_length" in r]
    for position in range(len(measured[0]["acceptance"]) if measured else 0):
        values = [r["acceptance"][position] for r in measured]
        right.plot([r["step"] for r in measured], values, marker="o", label=f"draft {position + 1}")
    right.set(xlabel="step", ylabel="share of places", title="accepted on held-out text", ylim=(0, 1))
    right.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120, format="png")
