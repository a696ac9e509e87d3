"""``jaxinfer verify-spec``: whether speculation emits the target's law, as a table, a picture and an exit code."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxinfer.config import CompileConfig, EngineConfig
from jaxinfer.draft_checking import drafter_checks
from jaxinfer.observability.compilation import unoptimized, use_compilation_cache
from jaxinfer.speculative.check.matrix import (
    SIGNIFICANT,
    TOLERANCE,
    Check,
    Finding,
    exact_checks,
    sampled_checks,
)
from serve.verify_spec_model import Comparison, compare_engines

Result = Finding | Comparison


TABLE_WIDTH = 120
"""Columns of the table where there is no terminal that says how many it has."""


def verify(
    samples: int,
    seed: int,
    plot: Path | None = None,
    config: EngineConfig | None = None,
    sequences: int = 200,
) -> int:
    """Prints what was found.

    Args:
        samples: sequences of each cell that is sampled on a small vocabulary.
        plot: PNG to write.
        config: a model to run with and without speculation too.
        sequences: that are sampled from that model, each way.

    Returns:
        0 if all laws are right, else 1.
    """
    use_compilation_cache(CompileConfig().cache_dir if config is None else config.compile.cache_dir)
    results: list[Result] = []
    stderr = Console(stderr=True)
    with Progress(console=stderr, disable=not stderr.is_terminal, transient=True) as bar, unoptimized():
        parts = (exact_checks(seed), sampled_checks(samples, seed), drafter_checks(seed=seed))
        results += _run_all([list(part) for part in parts], bar)
    if config is not None:
        results += compare_engines(config, sequences, seed)
    console = Console()
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    console.print(_table(results))
    wrong = [result for result in results if not result.holds]
    console.print(
        f"{len(results)} checks, {len(wrong)} wrong. Exact laws: the largest difference of two probabilities, which "
        f"may be {TOLERANCE:g}. Samples: p-values, corrected for the number of tests; they must reach {SIGNIFICANT:g}. "
        "Engines: tokens that are not those of the law and the request's random numbers."
    )
    if plot is not None:
        # matplotlib takes a second to import, and only the plot needs it.
        from serve.verify_spec_plot import plot_results

        plot_results(results, plot)
    return 1 if wrong else 0


def _run_all(parts: Sequence[Sequence[Check]], bar: Progress) -> list[Finding]:
    """Runs the parts side by side, each in its order: they compile much, which needs no lock of Python."""
    task = bar.add_task("laws of a small model", total=sum(map(len, parts)))

    def run(cells: Sequence[Check]) -> list[Finding]:
        findings = []
        for cell in cells:
            findings.append(cell())
            bar.advance(task)
        return findings

    with ThreadPoolExecutor(len(parts)) as threads:
        return [finding for findings in threads.map(run, parts) for finding in findings]


def _table(results: Sequence[Result]) -> Table:
    """One row per rule, kind of drafts and way of checking; the settings of a row side by side."""
    settings = list(dict.fromkeys(result.setting for result in results))
    table = Table(box=SIMPLE, padding=0, title="speculation against the target's processed law")
    for name in ("rule", "drafts", *settings):
        table.add_column(name, overflow="fold")
    rows: dict[tuple[str, str, bool], dict[str, Result]] = {}
    for result in results:
        exact = isinstance(result, Finding) and result.difference is not None
        rows.setdefault((result.rule, result.drafts, exact), {})[result.setting] = result
    for (rule, drafts, _), cells in rows.items():
        table.add_row(rule, drafts, *(_cell(cells.get(setting)) for setting in settings))
    return table


def _cell(result: Result | None) -> str:
    if result is None:
        return ""
    measure = result.measure.removesuffix(" off")
    return measure if result.holds else f"[bold red]{measure} WRONG[/bold red]"
