"""From records to JSON and to the one table that is printed last."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.records import Case, Results
from benchmarks.gpu.settings import PARTS

Row = Sequence[str]


def as_json(results: Results) -> dict[str, Any]:
    """All results under the names that other tools read: see docs/benchmarks.md."""
    kernels = [*results.of("kernels"), *results.of("more-kernels")]
    device = results.facts.get("device", {})
    return {
        "gpu": device.get("gpu"),
        "device": device,
        "run": {name: value for name, value in results.facts.items() if name != "device"},
        "ceilings": {name: _without_summary(values) for name, values in results.ok("ceilings").items()},
        "cases": {case.name: _without_summary(case.values) for case in kernels if case.status == "ok"},
        "steps": [_without_summary(values) for values in results.ok("steps").values()],
        "throughput": [_without_summary(values) for values in results.ok("throughput").values()],
        "failed": _reasons(results, "failed"),
        "skipped": _reasons(results, "skipped"),
        "open": [f"{case.part}: {case.name}" for case in results.cases.values() if case.status == "open"],
        "missing": [{"package": name, "effect": effect} for name, effect in results.missing.items()],
    }


def tables(results: Results) -> str:
    """Everything that a reader wants to see, as text."""
    blocks = [
        _header(results),
        _ceilings(results),
        _kernels(results),
        _steps(results),
        _throughput(results),
        _list("failed", _named(results, "failed")),
        _list("skipped", _named(results, "skipped")),
        _list("not installed", [f"{name}: {effect}" for name, effect in results.missing.items()]),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def table(title: str, columns: Row, rows: Sequence[Row]) -> str:
    """Columns of text, the first one to the left, numbers to the right; empty if there are no rows."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]

    def line(row: Row) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        return "  ".join(cells).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([f"== {title}", line(columns), rule, *(line(row) for row in rows)])


def write_text(path: Path, text: str) -> None:
    """Replaces a file in one step, so that a reader never finds half of it."""
    partial = path.with_suffix(path.suffix + ".part")
    partial.write_text(text)
    partial.replace(path)


def _header(results: Results) -> str:
    device = {"driver": results.facts.get("driver"), **results.facts.get("device", {})}
    names = ("kind", "compute_capability", "driver", "jax", "python", "cores", "xla_flags")
    facts = ", ".join(f"{name} {device[name]}" for name in names if device.get(name))
    counts = {status: sum(case.status == status for case in results.cases.values()) for status in _STATUSES}
    seconds = results.facts.get("seconds")
    took = "" if seconds is None else f" in {seconds:.0f} s"
    return (
        f"== {facts or 'no device was reached'}\n"
        f"{counts['ok']} cases measured, {counts['failed']} failed, {counts['skipped']} skipped{took}"
    )


_STATUSES = ("ok", "failed", "skipped", "open")


def _ceilings(results: Results) -> str:
    rows = [(name, values["summary"]) for name, values in results.ok("ceilings").items()]
    return table("ceilings: what this device does at best", ("what", "measured"), rows)


def _kernels(results: Results) -> str:
    good = {**results.ok("kernels"), **results.ok("more-kernels")}
    rows = [
        (
            name,
            _microseconds(values["seconds"]),
            f"{values['gb_per_second']:.0f}",
            f"{values['tflops']:.1f}",
            f"{100 * values['share']:.0f} % {values['bound']}",
            _ratio(values),
            f"{values['max_error']:.1e}",
        )
        for name, values in sorted(good.items())
    ]
    columns = ("kernel", "us", "GB/s", "TFLOP/s", "of ceiling", "XLA takes", "error")
    return table("kernels: median of a call", columns, rows)


def _steps(results: Results) -> str:
    rows = []
    by_name = results.ok("steps")
    for name, values in by_name.items():
        other = by_name.get(name.replace("/pallas", "/xla")) if "/pallas" in name else None
        ratio = "" if other is None else f"{other['seconds'] / values['seconds']:.2f} x"
        rows.append(
            (
                name,
                f"{1e3 * values['seconds']:.2f}",
                f"{1e3 * values['host_seconds']:.2f}",
                f"{values['tokens_per_second']:.0f}",
                f"{100 * values['share']:.0f} % {values['bound']}",
                ratio,
            )
        )
    columns = ("step", "ms", "host ms", "tok/s", "of ceiling", "XLA takes")
    return table("steps: backbone, head and sampler, one behind the other", columns, rows)


def _throughput(results: Results) -> str:
    rows = [
        (
            name if values["complete"] else f"{name} (stopped early)",
            f"{values['output_tokens_per_second']:.0f}",
            f"{values['output_tokens']}",
            f"{values['seconds']:.1f}",
            f"{values['steps']}",
            f"{100 * values['host_share']:.0f} %",
        )
        for name, values in results.ok("throughput").items()
    ]
    columns = ("engine", "output tok/s", "tokens", "s", "steps", "host's share")
    return table("throughput: 256 requests, prompts and outputs of 100 to 1024 tokens", columns, rows)


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.1f}"


def _ratio(values: Mapping[str, Any]) -> str:
    baseline = values.get("baseline_seconds")
    if baseline is None:
        return "fails" if values.get("baseline_failed") else "-"
    return f"{baseline / values['seconds']:.2f} x"


def _without_summary(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "summary"}


def _cases(results: Results, status: str) -> list[Case]:
    found = [case for case in results.cases.values() if case.status == status]
    order = {part: i for i, part in enumerate(PARTS)}
    return sorted(found, key=lambda case: order.get(case.part, len(order)))


def _reasons(results: Results, status: str) -> dict[str, str]:
    return {f"{case.part}: {case.name}": case.reason for case in _cases(results, status)}


def _named(results: Results, status: str) -> list[str]:
    return [f"{name}: {reason}" for name, reason in _reasons(results, status).items()]


def _list(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"== {title}", *lines]) if lines else ""
