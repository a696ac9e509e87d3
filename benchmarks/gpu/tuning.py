"""Part "tuning": every tuning choice of every case that has some, each checked against the oracle.

A result is named ``CASE#0`` for what the table or the op's rule gives now, and ``CASE#1``, ... for the candidates.
"""

import dataclasses
from concurrent.futures import Future
from functools import partial
from typing import Any

from benchmarks.gpu.compiling import Job, batches, compile_all
from benchmarks.gpu.context import Context
from benchmarks.gpu.kernels import Kernel, Reference, full_name, load_cases
from pallas_kernels.kernel_case import KernelCase


def run(context: Context) -> None:
    """Measures all choices of one case after the other, since they share inputs and oracle."""
    cases = {full_name(case): case for case in load_cases(context) if case.candidates}
    wanted = [f"{name}#{i}" for name, case in cases.items() for i in range(len(case.candidates) + 1)]
    todo = context.plan(wanted)
    for name, case in cases.items():
        mine = [full for full in todo if full.rsplit("#", 1)[0] == name]
        if not mine:
            continue
        if case.tuning_key is None:
            for full in mine:
                context.recorder.end("tuning", full, "skipped", reason="the case names no tuning_key")
            continue
        _tune(context, case, mine)


def _tune(context: Context, case: KernelCase, names: list[str]) -> None:
    reference = _reference(context, case, names)
    if reference is None:
        return
    if context.settings.serial:
        for name in names:
            context.attempt(name, 2.0, partial(_compile_and_measure, context, case, name, reference))
        return
    for batch in batches(names, context.settings.threads):
        jobs = [Job(name, partial(_compile, context, case, name, reference)) for name in batch]
        futures = compile_all(jobs, context.settings.threads, context.compile_seconds)
        for name in batch:
            if not futures[name].done() or futures[name].cancelled():
                context.recorder.end("tuning", name, "skipped", reason="it was not compiled in time")
                continue
            context.attempt(name, 1.0, partial(_finish, case, name, reference, futures[name]))


def _reference(context: Context, case: KernelCase, names: list[str]) -> Reference | None:
    try:
        return Reference.compile(case)
    except Exception as error:  # concerns this case only
        for name in names:
            context.fail(name, error)
        return None


def _choice(case: KernelCase, name: str) -> Any | None:
    index = int(name.rsplit("#", 1)[1])
    return None if index == 0 else case.candidates[index - 1]


def _compile(context: Context, case: KernelCase, name: str, reference: Reference) -> Kernel:
    return Kernel.compile(context, case, reference.shapes, _choice(case, name))


def _compile_and_measure(
    context: Context, case: KernelCase, name: str, reference: Reference
) -> dict[str, Any]:
    return _measure(case, name, reference, _compile(context, case, name, reference))


def _finish(case: KernelCase, name: str, reference: Reference, future: Future) -> dict[str, Any]:
    return _measure(case, name, reference, future.result(0))


def _measure(case: KernelCase, name: str, reference: Reference, kernel: Kernel) -> dict[str, Any]:
    error, sets = kernel.checked(case, reference)
    timing = kernel.many.measure(sets)
    choice = _choice(case, name)
    return {
        "op": case.op,
        "key": case.tuning_key,
        "case": full_name(case),
        "choice": None if choice is None else dataclasses.asdict(choice),
        "seconds": timing.median,
        "max_error": error,
        "summary": f"{1e6 * timing.median:.1f} us, {'now' if choice is None else choice}",
    }
