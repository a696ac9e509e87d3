"""A sweep as a plot: what speed per user costs, and how many devices a limit takes."""

from dataclasses import replace
from pathlib import Path

from jaxinfer.planning.layouts import Replica, candidates
from jaxinfer.planning.search import NoPlanError
from jaxinfer.planning.service import CHUNKS, MAX_SEQUENCES, ReplicaModel, Service, batches, serve
from serve.capacity.request import Question

_LIMITS = (0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2)
_MOST_LAYOUTS = 8


def plot(question: Question, path: Path) -> None:
    """Writes a PNG with two panels. Needs matplotlib (extra ``bench``).

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("--sweep needs matplotlib: pip install 'jaxinfer[bench]'") from None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for label, points in frontiers(question):
        left.plot(*zip(*points), marker=".", label=label)
    left.set(xlabel="tokens/s of a user (1 / TPOT)", ylabel="output tokens/s per GPU", xscale="log")
    left.set_title(f"{question.model.name} on {question.gpu.name}, TTFT within its limit")
    left.legend(fontsize=8)
    limits = [(limit * 1e3, devices) for limit, devices in devices_by_limit(question)]
    if limits:
        right.plot(*zip(*limits), marker="o")
    right.set(xlabel="limit of TPOT, ms", ylabel="GPUs", xscale="log", yscale="log")
    right.set_title(f"GPUs for {question.load.rate:,g} requests/s")
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def frontiers(question: Question) -> list[tuple[str, list[tuple[float, float]]]]:
    """Of each layout that can be: speed of a user against throughput of a device, where neither can be better without
    the other being worse. Pools of their own are not drawn: of these techniques only one pool."""
    techniques = replace(question.techniques, disaggregated=False)
    lines = []
    for layout in _layouts(question):
        try:
            model = ReplicaModel.make(question.parts, layout, question.gpu, techniques, question.assumed)
        except ValueError:
            continue
        sizes = batches(MAX_SEQUENCES * layout.sequence_shares)[::4]
        tried = (serve(model, question.load, size, chunk) for chunk in CHUNKS for size in sizes)
        in_time = [s for s in tried if s is not None and s.ttft <= question.load.ttft]
        points = _best(in_time, question.load.output, layout.devices)
        if points:
            lines.append((layout.label, points))
    return lines[:_MOST_LAYOUTS]


def devices_by_limit(question: Question) -> list[tuple[float, int]]:
    """Devices for the load under different limits of TPOT; limits that nothing meets are left out."""
    found = []
    for limit in _LIMITS:
        try:
            found.append((limit, question.answer(load=replace(question.load, tpot=limit)).devices))
        except NoPlanError:
            continue
    return found


def _layouts(question: Question) -> list[Replica]:
    if question.replica is not None:
        return [question.replica]
    attention = "data" if question.by_data else "shared"
    node_size, disaggregated = int(question.assumed.node_size), question.techniques.disaggregated
    return list(candidates(question.parts.config, node_size, 16, attention, disaggregated))  # type: ignore[arg-type]


def _best(found: list[Service], output: float, devices: int) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    for service in sorted(found, key=lambda s: s.tpot):
        throughput = service.rate * output / devices
        if not points or throughput > points[-1][1]:
            points.append((1 / service.tpot, throughput))
    return points
