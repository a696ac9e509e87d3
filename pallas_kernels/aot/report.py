"""Results as tables: for the terminal, for ``docs/kernels.md``, and as JSON."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.aot.inspect import KernelFacts
from pallas_kernels.aot.matrix import Result
from pallas_kernels.aot.occupancy import blocks_per_sm
from pallas_kernels.aot.roofline import Measurements, bound, case_key
from pallas_kernels.gpus import GPUS
from pallas_kernels.kernel_case import KernelCase

HEADER = (
    *("op", "backend", "case", "gpu", "kernel", "registers", "spilled", "shared KiB", "threads", "grid"),
    *("tensor cores", "blocks/SM", "seconds"),
)

Row = tuple[str, ...]


def rows(results: Iterable[Result]) -> list[Row]:
    """One row per kernel of each result, see ``HEADER``."""
    return [_row(result, kernel) for result in results for kernel in result.kernels]


def plain_table(header: Row, body: Sequence[Row]) -> str:
    """Columns aligned with spaces."""
    widths = [max(len(row[i]) for row in (header, *body)) for i in range(len(header))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (header, *body)
    )
    return "\n".join(lines)


def markdown_table(header: Row, body: Sequence[Row]) -> str:
    """A table of GitHub's Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, tuple("---" for _ in header), *body)]
    return "\n".join(lines)


def as_json(results: Iterable[Result]) -> list[dict[str, Any]]:
    """Everything that was found, for other programs."""
    return [
        {
            "case": result.variant.label,
            "gpu": result.variant.gpu,
            "problems": list(result.problems),
            "seconds": None if result.facts is None else round(result.facts.seconds, 2),
            "temp_bytes": None if result.facts is None else result.facts.temp_bytes,
            "kernels": [
                vars(kernel) | {"blocks_per_sm": _blocks(result, kernel)} for kernel in result.kernels
            ],
        }
        for result in results
    ]


def compiled_markdown(results: Sequence[Result]) -> str:
    """A section per op: cases down, GPUs across."""
    gpus = list(dict.fromkeys(result.variant.gpu for result in results))
    cells = {(_case(result), result.variant.gpu): _cell(result) for result in results}
    sections = []
    for op in dict.fromkeys(result.variant.case.op for result in results):
        cases = dict.fromkeys(_case(result) for result in results if result.variant.case.op == op)
        body = [
            (name, backend, *(cells.get(((op, backend, name), gpu), "") for gpu in gpus))
            for (_, backend, name) in cases
        ]
        sections.append(f"### {op}\n\n" + markdown_table(("case", "backend", *gpus), body))
    return "\n\n".join(sections)


def roofline_markdown(cases: Sequence[KernelCase], gpus: Sequence[str], measured: Measurements) -> str:
    """A section per op: the work, the bound of each GPU, and what was measured on those that were at hand."""
    sections = []
    seen = [gpu for gpu in gpus if any(name == gpu for name, _ in measured)]
    columns = [f"{gpu} µs" for gpu in gpus] + [f"measured on {gpu}: µs (share)" for gpu in seen]
    columns += [] if seen else ["measured"]
    for op in dict.fromkeys(case.op for case in cases):
        body = [_roofline_row(case, gpus, seen, measured) for case in cases if case.op == op]
        sections.append(f"### {op}\n\n" + markdown_table(("case", "backend", "MB", "GFLOP", *columns), body))
    return "\n\n".join(sections)


def replace_section(path: Path, name: str, text: str) -> None:
    """Replaces what stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``.

    Raises:
        ValueError: the file has no such pair of markers.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    old = path.read_text()
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(old):
        raise ValueError(f"{path} has no section between {begin} and {end}")
    path.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", old, count=1))


def _row(result: Result, kernel: KernelFacts) -> Row:
    case = result.variant.case
    assert result.facts is not None
    return (
        case.op,
        case.backend,
        result.variant.label.split("/", 2)[2],
        result.variant.gpu,
        kernel.name,
        str(kernel.registers),
        str(kernel.spill_bytes),
        f"{kernel.shared_bytes / 1024:.1f}",
        str(kernel.threads or "?"),
        kernel.grid or "?",
        "+".join(kernel.instructions) or "-",
        str(_blocks(result, kernel) or "?"),
        f"{result.facts.seconds:.1f}",
    )


def _blocks(result: Result, kernel: KernelFacts) -> int | None:
    if not kernel.threads:
        return None
    return blocks_per_sm(
        GPUS[result.variant.gpu],
        registers=kernel.registers,
        shared_bytes=kernel.shared_bytes,
        threads=kernel.threads,
    )


def _case(result: Result) -> tuple[str, str, str]:
    op, backend, name = result.variant.label.split("/", 2)
    return op, backend, name


def _cell(result: Result) -> str:
    """Registers, shared memory, tensor-core instruction and blocks per SM of the largest kernel."""
    if not result.kernels:
        return "failed"
    kernel = max(result.kernels, key=lambda k: (bool(k.instructions), k.shared_bytes, k.registers))
    parts = [
        f"{kernel.registers} r",
        f"{kernel.shared_bytes / 1024:.0f} KiB",
        f"{_blocks(result, kernel)}/SM",
    ]
    parts += ["+".join(kernel.instructions)] if kernel.instructions else []
    return ", ".join(parts) + (" **fails**" if result.problems else "")


def _roofline_row(case: KernelCase, gpus: Sequence[str], seen: Sequence[str], measured: Measurements) -> Row:
    bounds = {gpu: bound(case.work, GPUS[gpu]) for gpu in gpus if GPUS[gpu].generation in case.generations}
    cells = [case.name, case.backend, f"{case.work.bytes / 1e6:.2f}", f"{case.work.flops / 1e9:.2f}"]
    cells += [f"{bounds[gpu].seconds * 1e6:.1f} {bounds[gpu].kind}" if gpu in bounds else "" for gpu in gpus]
    for gpu in seen:
        value = measured.get((gpu, case_key(case)))
        if value is None or gpu not in bounds:
            cells.append("")
        else:
            cells.append(f"{value.seconds * 1e6:.1f} ({bounds[gpu].seconds / value.seconds:.0%})")
    return tuple(cells) if seen else (*cells, "")
