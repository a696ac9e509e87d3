"""Plots of a run; needs matplotlib."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_COLORS = {"bytes": "tab:blue", "flops": "tab:orange"}


def plot_kernels(cases: dict[str, dict[str, Any]], path: Path) -> None:
    """A bar per kernel: its share of the ceiling that bounds it."""
    names = sorted(cases, key=lambda name: (name.split("/")[0], -cases[name]["share"]))
    figure = Figure(figsize=(9, 1.2 + 0.24 * len(names)), layout="constrained")
    axes = figure.subplots()
    shares = [100 * cases[name]["share"] for name in names]
    bars = axes.barh(names, shares, color=[_COLORS[cases[name]["bound"]] for name in names])
    axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
    axes.axvline(100, color="gray", linewidth=0.8)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.margins(y=0.01)
    axes.set_xlabel("% of the measured ceiling (blue: copy bandwidth, orange: matrix products)")
    axes.set_title("Kernels")
    figure.savefig(path, dpi=130)


def plot_steps(steps: list[dict[str, Any]], path: Path) -> None:
    """Time of a decode step by batch size, with Pallas kernels, without CUDA graphs, and without kernels."""
    models = list(dict.fromkeys(step["model"] for step in steps))
    figure = Figure(figsize=(5 * len(models), 4), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models):
        for label, kernels, graphs, style in (
            ("Pallas", "pallas", True, "o-"),
            ("Pallas, no CUDA graphs", "pallas", False, "s--"),
            ("XLA gather", "xla", True, "^-"),
        ):
            line = [
                (step["batch"], 1e3 * step["seconds"], 1e3 * step["seconds"] * step["share"])
                for step in steps
                if (step["model"], step["phase"]) == (model, "decode")
                and (step["kernels"], step["command_buffers"]) == (kernels, graphs)
            ]
            if line:
                batch, seconds, floor = zip(*sorted(line))
                axes.plot(batch, seconds, style, label=label)
                if kernels == "pallas" and graphs:
                    axes.plot(batch, floor, ":", color="gray", label="weights and KV at copy bandwidth")
        axes.set(xscale="log", yscale="log", xlabel="sequences", ylabel="decode step, ms", title=model)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.savefig(path, dpi=130)
