"""Parts "kernels" and "more-kernels": every kernel against its oracle, the ceilings, and the XLA path."""

import importlib
import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from benchmarks.gpu.compiling import Job, batches, compile_all
from benchmarks.gpu.context import Context
from benchmarks.gpu.numerics import largest_error
from benchmarks.gpu.timing import SMOKE_PLAN, Plan, Program, Repeated, nbytes
from pallas_kernels.kernel_case import KernelCase

MOST_SHARE = 3.0
"""Of the ceiling; caches explain a little more than 1, only a call that was dropped explains more than this."""

NO_AUTOTUNING: Any = {"xla_gpu_autotune_level": 0}
"""For programs whose speed does not matter."""


@dataclass(frozen=True)
class Reference:
    """What a case is checked with.

    Attributes:
        inputs: key -> arguments.
        shapes: of the arguments.
    """

    inputs: jax.stages.Compiled
    oracle: jax.stages.Compiled
    shapes: tuple[Any, ...]

    @classmethod
    def compile(cls, case: KernelCase) -> "Reference":
        key = jax.eval_shape(lambda: jax.random.key(0))
        shapes = jax.eval_shape(case.inputs, key)
        # It computes in float32, for which XLA would take TF32 if it were not told.
        with jax.default_matmul_precision("highest"):
            oracle = jax.jit(case.oracle).lower(*shapes)
        inputs = jax.jit(case.inputs).lower(key)
        return cls(
            inputs=inputs.compile(compiler_options=NO_AUTOTUNING),
            oracle=oracle.compile(compiler_options=NO_AUTOTUNING),
            shapes=shapes,
        )


@dataclass(frozen=True)
class Kernel:
    """A case's kernel with one tuning choice.

    Attributes:
        once: one call, for numerics.
        many: many calls, for speed.
    """

    once: jax.stages.Compiled
    many: Program

    @classmethod
    def compile(
        cls, context: Context, case: KernelCase, shapes: tuple[Any, ...], choice: Any | None = None
    ) -> "Kernel":
        function = case.build(context.generation, choice)
        plan = plan_of(context, case, nbytes(shapes), slowness=1.5)
        return cls(
            once=jax.jit(function).lower(*shapes).compile(),
            many=Repeated(function, case.donate, shapes, plan).compile(),
        )

    def checked(self, case: KernelCase, reference: Reference) -> tuple[float, tuple[Any, ...]]:
        """The error against the oracle, and the sets of inputs to measure with.

        Raises:
            ArithmeticError: the error is larger than the case allows.
        """
        count = self.many.repeated.plan.sets
        sets = tuple(reference.inputs(jax.random.key(i)) for i in range(count))
        error = largest_error(self.once(*sets[0]), reference.oracle(*sets[0]))
        if not error <= case.tolerance:
            raise ArithmeticError(f"differs from the oracle by {error:.3g}, allowed is {case.tolerance:.3g}")
        return error, sets


@dataclass(frozen=True)
class Prepared:
    """The compiled programs of a case.

    Attributes:
        baseline: None if there is none; text if it does not compile.
    """

    reference: Reference
    kernel: Kernel
    baseline: Program | str | None


def run(context: Context) -> None:
    """Measures the quick cases, or in "more-kernels" the others."""
    quick = context.settings.part == "kernels"
    cases = {full_name(case): case for case in load_cases(context) if case.quick == quick}
    names = context.plan(cases)
    size = 1 if context.settings.serial else context.settings.threads
    for batch in batches(names, size):
        if context.settings.serial:
            for name in batch:
                context.attempt(name, 2.0, partial(_prepare_and_measure, context, cases[name]))
            continue
        jobs = [Job(name, partial(prepare, context, cases[name])) for name in batch]
        futures = compile_all(jobs, context.settings.threads, context.compile_seconds)
        for name in batch:
            finish(context, name, cases[name], futures[name])


def load_cases(context: Context) -> list[KernelCase]:
    """The cases of the device's generation, quick ones first; the ops take turns, so that none is left out when time
    runs short.
    """
    module = importlib.import_module(context.settings.cases_from)
    cases = [case for case in module.all_cases() if context.generation in case.generations]
    by_op: dict[str, list[KernelCase]] = {}
    for case in sorted(cases, key=lambda case: not case.quick):
        by_op.setdefault(case.op, []).append(case)
    rounds: Iterable[Sequence[KernelCase | None]] = itertools.zip_longest(*by_op.values())
    return [case for turn in rounds for case in turn if case is not None]


def full_name(case: KernelCase) -> str:
    """Unique among all cases."""
    return f"{case.op}/{case.backend}/{case.name}"


def prepare(context: Context, case: KernelCase) -> Prepared:
    """Compiles what a case needs."""
    reference = Reference.compile(case)
    kernel = Kernel.compile(context, case, reference.shapes)
    return Prepared(reference, kernel, _baseline(context, case, reference.shapes))


def plan_of(context: Context, case: KernelCase, input_bytes: int, slowness: float) -> Plan:
    """How often to call a function that takes about ``slowness`` times as long as the device's limits allow."""
    if context.settings.smoke:
        return SMOKE_PLAN
    floor, _ = context.ceilings.floor(case.work)
    expected = slowness * floor + context.ceilings.launch
    return Plan.make(expected, case.work.bytes, input_bytes, context.ceilings.l2_bytes)


def _baseline(context: Context, case: KernelCase, shapes: tuple[Any, ...]) -> Program | str | None:
    if case.baseline is None:
        return None
    try:
        plan = plan_of(context, case, nbytes(shapes), slowness=4.0)
        return Repeated(case.baseline, case.donate, shapes, plan).compile()
    except Exception as error:  # it must not cost the kernel its result
        return f"{type(error).__name__}: {error}"[:200]


def finish(context: Context, name: str, case: KernelCase, future: Future) -> None:
    """Measures what was compiled ahead."""
    if not future.done() or future.cancelled():
        context.recorder.end(context.settings.part, name, "skipped", reason="it was not compiled in time")
        return
    context.attempt(name, 1.0, lambda: measure(context, case, future.result(0)))


def _prepare_and_measure(context: Context, case: KernelCase) -> dict[str, Any]:
    return measure(context, case, prepare(context, case))


def measure(context: Context, case: KernelCase, prepared: Prepared) -> dict[str, Any]:
    """Numerics and speed of a case.

    Raises:
        ArithmeticError: the result differs from the oracle's by more than the case allows, or the time is too short
            to be true.
    """
    error, sets = prepared.kernel.checked(case, prepared.reference)
    timing = prepared.kernel.many.measure(sets)
    floor, bound = context.ceilings.floor(case.work)
    if floor > MOST_SHARE * timing.median and not context.settings.smoke:
        raise ArithmeticError(
            f"{1e6 * timing.median:.2f} us is {floor / timing.median:.1f} times faster than the device can be"
        )
    values = {
        "seconds": timing.median,
        "best_seconds": timing.best,
        "max_error": error,
        "tolerance": case.tolerance,
        "gb_per_second": case.work.bytes / timing.median / 1e9,
        "tflops": case.work.flops / timing.median / 1e12,
        "bound": bound,
        "share": floor / timing.median,
        "input_sets": len(sets),
        "baseline_seconds": None,
    }
    if isinstance(prepared.baseline, Program):
        try:
            used = sets[: prepared.baseline.repeated.plan.sets]
            values["baseline_seconds"] = prepared.baseline.measure(used).median
        except jax.errors.JaxRuntimeError as failure:
            values["baseline_failed"] = str(failure)[:200]
    elif prepared.baseline is not None:
        values["baseline_failed"] = prepared.baseline
    return values | {"summary": _summary(values)}


def _summary(values: dict[str, Any]) -> str:
    against = "no XLA path"
    if values["baseline_seconds"] is not None:
        against = f"XLA takes {values['baseline_seconds'] / values['seconds']:.2f} times that"
    share = f"{100 * values['share']:.0f} % of the {values['bound']} ceiling"
    return f"{1e6 * values['seconds']:.1f} us, {share}, {against}"
