"""Every shipped kernel, shape and tuning choice, compiled for every GPU it is shipped for."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import jax

from pallas_kernels.all_cases import all_cases, find_case
from pallas_kernels.aot.checks import problems
from pallas_kernels.aot.compile import Program
from pallas_kernels.aot.inspect import KernelFacts, ProgramFacts
from pallas_kernels.aot.isolated import Job, Outcome, run_isolated
from pallas_kernels.gpus import GPUS, Generation
from pallas_kernels.kernel_case import KernelCase

MOSAIC_SINCE = (0, 11)
"""JAX version from which Mosaic compiles for GPUs that are not there."""

_PRELOAD = (
    "pallas_kernels.aot.matrix",
    "jax.experimental.pallas.triton",
    "jax.experimental.pallas.mosaic_gpu",
)


@dataclass(frozen=True)
class Variant:
    """One compilation.

    Attributes:
        candidate: index of one of the case's candidates; None for the choice that is shipped.
    """

    case: KernelCase
    gpu: str
    candidate: int | None = None

    @property
    def job(self) -> Job:
        case, generation = self.case, GPUS[self.gpu].generation
        args = (case.op, case.backend, case.name, generation, self.candidate)
        return Job(f"{__name__}:case_program", args, self.gpu)

    @property
    def label(self) -> str:
        suffix = "" if self.candidate is None else f" {self.case.candidates[self.candidate]}"
        return f"{self.case.op}/{self.case.backend}/{self.case.name}{suffix}"


@dataclass(frozen=True)
class Result:
    """A compiled variant, and what is wrong with it."""

    variant: Variant
    facts: ProgramFacts | None
    problems: tuple[str, ...]

    @property
    def kernels(self) -> tuple[KernelFacts, ...]:
        """The Pallas kernels of the program."""
        return tuple(k for k in self.facts.kernels if k.pallas) if self.facts is not None else ()


@dataclass(frozen=True)
class Skipped:
    """Cases that this installation cannot compile."""

    count: int
    reason: str


def case_program(op: str, backend: str, name: str, generation: Generation, candidate: int | None) -> Program:
    """What a process compiles; it looks the case up by its name, because functions do not travel."""
    case = find_case(op, backend, name)
    choice = None if candidate is None else case.candidates[candidate]
    args = jax.eval_shape(lambda: case.inputs(jax.random.key(0)))
    return Program(case.build(generation, choice), args, donate=case.donate)


def variants(
    gpus: Sequence[str], *, op: str | None = None, quick: bool = False, candidates: bool = False
) -> tuple[tuple[Variant, ...], Skipped | None]:
    """What is to be compiled, and what cannot be.

    Args:
        op: only this one.
        quick: only the subset that every change is checked with.
        candidates: also the tuning choices that are not shipped.
    """
    cases = [c for c in all_cases() if (op is None or c.op == op) and (c.quick or not quick)]
    old = jax.__version_info__[:2] < MOSAIC_SINCE
    left_out = [c for c in cases if old and c.backend == "mosaic"]
    found = []
    for case in cases:
        if case in left_out:
            continue
        for gpu in (gpu for gpu in gpus if GPUS[gpu].generation in case.generations):
            found.append(Variant(case, gpu))
            found += [Variant(case, gpu, i) for i in range(len(case.candidates) if candidates else 0)]
    reason = f"Mosaic needs jax {'.'.join(map(str, MOSAIC_SINCE))} or newer, installed is {jax.__version__}"
    return tuple(found), Skipped(len(left_out), reason) if left_out else None


def compile_all(
    wanted: Sequence[Variant], *, processes: int, progress: Callable[[int, Result], None]
) -> tuple[Result, ...]:
    """Compiles and checks variants.

    Args:
        progress: called with the number of variants that are done, and the newest result.

    Returns:
        Results in the order of ``wanted``.
    """
    by_job = {variant.job: variant for variant in wanted}
    results: dict[Job, Result] = {}
    outcomes: Iterable[Outcome] = run_isolated(list(by_job), processes=processes, preload=_PRELOAD)
    for outcome in outcomes:
        results[outcome.job] = _result(by_job[outcome.job], outcome)
        progress(len(results), results[outcome.job])
    return tuple(results[variant.job] for variant in wanted)


def _result(variant: Variant, outcome: Outcome) -> Result:
    if outcome.facts is None:
        return Result(variant, None, (outcome.error,))
    found = problems(variant.case.limits, GPUS[variant.gpu], outcome.facts, outcome.donated_bytes)
    return Result(variant, replace(outcome.facts, hlo=""), found)  # the text of a program is large
