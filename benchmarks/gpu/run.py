"""Everything that can be known of a GPU in a few minutes: kernels, steps, throughput, against the card's own limits.

    python benchmarks/gpu/run.py --out results [--minutes 6] [--only kernels steps] [--cases 'ragged*']

Needs JAX with CUDA and NumPy; uses no network. What else is installed is used, what is missing is named. Each part
runs in a process of its own under a time limit; what is measured is in DIR/results.json at once. Prints one table last,
which is also in DIR/results.txt; plots are next to it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # the repository, not this folder

from benchmarks.gpu import records, report, stand_ins  # noqa: E402
from benchmarks.gpu.records import Recorder  # noqa: E402
from benchmarks.gpu.settings import PARTS, SHARES, Settings  # noqa: E402
from benchmarks.gpu.supervise import run_part  # noqa: E402

REPORT_SECONDS = 8.0
"""Kept for the table and the plots."""

STOP_SECONDS = 3.0
"""Between the time at which a part should be done and the time at which it is ended."""


@dataclass(frozen=True)
class Budget:
    """When each part has to be done: shares of the time, and what a part leaves goes to the next ones."""

    start: float
    seconds: float
    parts: tuple[str, ...]

    def deadline(self, part: str) -> float:
        done = self.parts[: self.parts.index(part) + 1]
        total = sum(SHARES[name] for name in self.parts)
        usable = max(self.seconds - REPORT_SECONDS, 0.0)
        return self.start + usable * sum(SHARES[name] for name in done) / total


def main() -> int:
    arguments = parse_arguments()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    path = out / "records.jsonl"
    path.unlink(missing_ok=True)
    recorder = Recorder(path)
    start = time.time()
    recorder.fact("started", start)
    recorder.fact("command", " ".join(sys.argv[1:]))
    stand_ins.hide(arguments.hide)
    note_missing(recorder)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        measure(arguments, Budget(start, 60 * arguments.minutes, tuple(arguments.only)), path)
    except KeyboardInterrupt:
        print("interrupted: the report holds what was measured", flush=True)
    recorder.fact("driver", driver_version())
    recorder.fact("seconds", time.time() - start)
    return finish(out, path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go")
    parser.add_argument("--minutes", type=float, default=6.0, help="for everything (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts")
    parser.add_argument("--cases", default="*", metavar="PATTERN", help="only cases whose name matches")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes: does everything run?")
    parser.add_argument("--cache", type=Path, help="compilation cache (default: DIR/xla-cache)")
    parser.add_argument("--threads", type=int, default=max(2, (os.cpu_count() or 2) - 2), help="that compile")
    parser.add_argument("--cases-from", help="module with the kernel cases")
    parser.add_argument("--hide", nargs="+", default=[], help="packages to treat as missing")
    return parser.parse_args()


def measure(arguments: argparse.Namespace, budget: Budget, path: Path) -> None:
    """Runs the parts; results.json is rewritten whenever there is something new."""
    module = arguments.cases_from or (
        "benchmarks.gpu.smoke_cases" if arguments.smoke else "pallas_kernels.all_cases"
    )
    settings = Settings(
        part="",
        records=path.resolve(),
        deadline=0.0,
        platform=arguments.platform,
        smoke=arguments.smoke,
        cache_directory=str((arguments.cache or arguments.out / "xla-cache").resolve()),
        cases_from=module,
        pattern=arguments.cases,
        threads=arguments.threads,
        hide=tuple(arguments.hide),
    )
    for part in budget.parts:
        deadline = budget.deadline(part)
        left = deadline - time.time()
        print(f"[{time.time() - budget.start:5.1f} s] {part}: at most {left:.0f} s", flush=True)
        # A pattern for kernels would leave out every ceiling.
        mine = settings if part != "ceilings" else _without_pattern(settings)
        run_part(
            mine.for_part(part, deadline - STOP_SECONDS),
            deadline,
            lambda: write_json(arguments.out, report.as_json(records.read(path))),
        )
        if "device" not in records.read(path).facts and left > STOP_SECONDS:
            print(f"no device of platform {arguments.platform!r} was reached", flush=True)
            return


def _without_pattern(settings: Settings) -> Settings:
    from dataclasses import replace

    return replace(settings, pattern="*")


def note_missing(recorder: Recorder) -> None:
    """Says at the start what is not installed; the parts that import the engine add what they replaced."""
    if stand_ins.is_missing("matplotlib"):
        recorder.missing("matplotlib", "no plots")
        print("matplotlib is not installed: no plots", flush=True)
    for package in (*stand_ins.IMITATED, *stand_ins.INERT):
        if stand_ins.is_missing(package):
            print(f"{package} is not installed: a stand-in is used", flush=True)


def driver_version() -> str:
    """What nvidia-smi says; empty without it."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def write_json(out: Path, values: dict[str, Any]) -> None:
    report.write_text(out / "results.json", json.dumps(values, indent=1) + "\n")


def finish(out: Path, path: Path) -> int:
    """Writes plots and results, prints the table; 1 if something failed or nothing was measured."""
    results = records.read(path)
    values = report.as_json(results)
    write_json(out, values)
    if not stand_ins.is_missing("matplotlib"):
        try:
            from benchmarks.gpu import plots

            if values["cases"]:
                plots.plot_kernels(values["cases"], out / "kernels.png")
            if values["steps"]:
                plots.plot_steps(values["steps"], out / "steps.png")
        except Exception as error:  # a plot must not cost the table
            print(f"plots failed: {error}", flush=True)
    text = report.tables(results)
    report.write_text(out / "results.txt", text)
    print("\n" + text, flush=True)
    measured = any(values[part] for part in ("ceilings", "cases", "steps", "throughput"))
    return 1 if values["failed"] or not measured else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
