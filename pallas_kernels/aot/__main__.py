"""``python -m pallas_kernels.aot``: compiles the shipped kernels for GPUs that are not there, and checks the result."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pallas_kernels.all_cases import all_cases
from pallas_kernels.aot import report
from pallas_kernels.aot.matrix import Result, Variant, compile_all, variants
from pallas_kernels.aot.progress import Progress
from pallas_kernels.aot.roofline import read_measurements
from pallas_kernels.aot.toolchain import missing
from pallas_kernels.gpus import GPUS


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if every case keeps to its limits, 1 if one does not, 2 if nothing can be compiled."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.markdown is not None and (args.quick or args.op or args.candidates):
        parser.error("--markdown writes whole tables; it does not go with --quick, --op or --candidates")
    if args.roofline is not None:
        _write_roofline(args.roofline, args)
        return 0
    if (problem := missing()) is not None:
        print(f"cannot compile for GPUs here: {problem}", file=sys.stderr)
        return 2
    wanted, skipped = variants(args.gpus, op=args.op, quick=args.quick, candidates=args.candidates)
    if not wanted and skipped is None:
        print("no case matches", file=sys.stderr)
        return 2
    results = _compile(wanted, args.jobs)
    print(report.plain_table(report.HEADER, report.rows(results)))
    if skipped is not None:
        print(f"skipped {skipped.count} cases: {skipped.reason}")
    if args.json is not None:
        args.json.write_text(json.dumps(report.as_json(results), indent=1) + "\n")
    if args.markdown is not None:
        report.replace_section(args.markdown, "compiled", report.compiled_markdown(results))
        _write_roofline(args.markdown, args)
    failed = [result for result in results if result.problems]
    for result in failed:
        print(f"FAILED {result.variant.label} on {result.variant.gpu}: {'; '.join(result.problems)}")
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return bool(failed)


def _write_roofline(path: Path, args: argparse.Namespace) -> None:
    text = report.roofline_markdown(all_cases(), args.gpus, read_measurements(args.measured))
    report.replace_section(path, "roofline", text)


def _compile(wanted: Sequence[Variant], jobs: int) -> tuple[Result, ...]:
    progress = Progress(len(wanted))

    def show(done: int, result: Result) -> None:
        state = "FAILED" if result.problems else "ok"
        progress.show(done, f"{result.variant.gpu} {result.variant.label} {state}")

    return compile_all(wanted, processes=jobs, progress=show)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.aot", description=__doc__.split(": ", 1)[1]
    )
    parser.add_argument("--gpus", type=_gpus, default=tuple(GPUS), help=f"of {','.join(GPUS)} (default: all)")
    parser.add_argument("--op", help="only this op")
    parser.add_argument(
        "--quick", action="store_true", help="only the subset that every change is checked with"
    )
    parser.add_argument(
        "--candidates", action="store_true", help="also the tuning choices that are not shipped"
    )
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="rewrite the tables of this file")
    parser.add_argument(
        "--roofline",
        type=Path,
        metavar="FILE",
        help="compile nothing, rewrite only the rooflines of this file",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        nargs="*",
        default=(),
        metavar="FILE",
        help="results of benchmarks/gpu/run.py",
    )
    return parser


def _gpus(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in GPUS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown GPU {unknown[0]!r}; allowed: {', '.join(GPUS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
