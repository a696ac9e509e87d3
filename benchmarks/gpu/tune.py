"""Fills the ``tuning.json`` of the ops on the GPU of this machine.

    python benchmarks/gpu/tune.py --out results [--minutes 10] [--cases 'ragged*'] [--dry-run]

Measures every choice of every case that has candidates and a ``tuning_key``, with numerics checked, and writes the
fastest of each key, if it is faster than what the table or the op's rule gives now by more than noise. The tables are
also written to DIR, so that they can be carried from another machine.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # the repository, not this folder

from benchmarks.gpu import records, report  # noqa: E402
from benchmarks.gpu.records import Recorder, Results  # noqa: E402
from benchmarks.gpu.settings import Settings  # noqa: E402
from benchmarks.gpu.supervise import run_part  # noqa: E402
from pallas_kernels.gpus import Generation, generation_of  # noqa: E402
from pallas_kernels.tuning_table import TuningTable  # noqa: E402

GAIN = 0.02
"""Less is noise: the choice that is there stays."""

REPORT_SECONDS, STOP_SECONDS = 3.0, 3.0


@dataclass(frozen=True)
class Decision:
    """The outcome for one key of an op's table.

    Attributes:
        now, best: seconds, summed over the cases of the key; ``best`` is None if no candidate works for all of them.
        choice: fields of the best candidate, as they go to the table.
    """

    op: str
    key: str
    now: float
    best: float | None
    choice: dict[str, Any] | None

    @property
    def changes(self) -> bool:
        return self.best is not None and self.best < (1 - GAIN) * self.now


def decide(results: Results) -> list[Decision]:
    """The best choice of every key whose present choice was measured for all its cases."""
    by_key: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for values in results.ok("tuning").values():
        by_key.setdefault((values["op"], values["key"]), []).append(values)
    decisions = []
    for (op, key), measured in sorted(by_key.items()):
        now = {v["case"]: v["seconds"] for v in measured if v["choice"] is None}
        if set(now) != {v["case"] for v in measured}:
            continue
        by_choice: dict[str, dict[str, float]] = {}
        for values in measured:
            if values["choice"] is not None:
                text = json.dumps(values["choice"], sort_keys=True)
                by_choice.setdefault(text, {})[values["case"]] = values["seconds"]
        complete = {text: sum(t.values()) for text, t in by_choice.items() if set(t) == set(now)}
        best = min(complete, key=lambda text: complete[text], default=None)
        decisions.append(
            Decision(
                op,
                key,
                sum(now.values()),
                None if best is None else complete[best],
                None if best is None else json.loads(best),
            )
        )
    return decisions


def new_tables(decisions: Iterable[Decision], generation: Generation, tables: Path) -> dict[str, str]:
    """Text of the changed tables by op; ``tables`` holds OP/tuning.json."""
    changed: dict[str, dict[str, dict[str, Any]]] = {}
    for decision in decisions:
        if decision.changes and decision.choice is not None:
            changed.setdefault(decision.op, {})[decision.key] = decision.choice
    return {
        op: TuningTable(tables / op / "tuning.json").with_entries(generation, entries)
        for op, entries in changed.items()
    }


def table(decisions: list[Decision]) -> str:
    """Old against new."""
    rows = [
        (
            f"{d.op} {d.key}",
            f"{1e6 * d.now:.1f}",
            "-" if d.best is None else f"{1e6 * d.best:.1f}",
            "-" if d.best is None else f"{d.now / d.best:.2f} x",
            ", ".join(f"{name}={value}" for name, value in (d.choice or {}).items()) if d.changes else "kept",
        )
        for d in decisions
    ]
    return report.table("tuning", ("key", "now us", "best us", "faster", "new choice"), rows)


def main() -> int:
    arguments = parse_arguments()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    path = out / "tuning-records.jsonl"
    path.unlink(missing_ok=True)
    start = time.time()
    Recorder(path).fact("started", start)
    deadline = start + max(60 * arguments.minutes - REPORT_SECONDS, 1.0)
    settings = Settings(
        part="tuning",
        records=path.resolve(),
        deadline=deadline - STOP_SECONDS,
        platform=arguments.platform,
        smoke=arguments.smoke,
        cache_directory=str((arguments.cache or out / "xla-cache").resolve()),
        cases_from=arguments.cases_from
        or ("benchmarks.gpu.smoke_cases" if arguments.smoke else "pallas_kernels.all_cases"),
        pattern=arguments.cases + "#*",
        threads=arguments.threads,
    )
    run_part(settings, deadline, lambda: None)
    return finish(arguments, records.read(path))


def finish(arguments: argparse.Namespace, results: Results) -> int:
    """Writes the tables and prints old against new; 1 if nothing was measured."""
    decisions = decide(results)
    capability = results.facts.get("device", {}).get("compute_capability")
    generation = (generation_of(capability) if capability else None) or "hopper"
    for op, text in new_tables(decisions, generation, arguments.tables).items():
        report.write_text(arguments.out / f"{op}.tuning.json", text)
        if not arguments.dry_run:
            report.write_text(arguments.tables / op / "tuning.json", text)
    print("\n" + (table(decisions) or "nothing was measured"))
    for status in ("failed", "skipped"):
        for case in results.of("tuning"):
            if case.status == status:
                print(f"{status}: {case.name}: {case.reason}")
    if arguments.dry_run:
        print("dry run: no table was changed")
    return 0 if decisions else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go")
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything (default: %(default)s)")
    parser.add_argument("--cases", default="*", metavar="PATTERN", help="only cases whose name matches")
    parser.add_argument("--dry-run", action="store_true", help="measure, but change no table")
    parser.add_argument(
        "--tables", type=Path, default=ROOT / "pallas_kernels", help="folder of OP/tuning.json"
    )
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny kernels: does everything run?")
    parser.add_argument("--cache", type=Path, help="compilation cache (default: DIR/xla-cache)")
    parser.add_argument("--threads", type=int, default=max(2, (os.cpu_count() or 2) - 2), help="that compile")
    parser.add_argument("--cases-from", help="module with the kernel cases")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
