"""The least time that a kernel can take on a card: its bytes at the memory's bandwidth, or its operations at the peak.

Method: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (2009).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pallas_kernels.gpus import Gpu
from pallas_kernels.kernel_case import KernelCase, Work


@dataclass(frozen=True)
class Bound:
    """Seconds, and what takes them."""

    seconds: float
    kind: Literal["memory", "compute"]


@dataclass(frozen=True)
class Measured:
    """What ``benchmarks/gpu/run.py`` found for a case; seconds of one call."""

    seconds: float
    baseline_seconds: float | None
    max_error: float


Measurements = dict[tuple[str, str], Measured]
"""By GPU name and case ("op/backend/name")."""


def bound(work: Work, gpu: Gpu) -> Bound:
    """The roofline of some work.

    Raises:
        KeyError: the card has no units for the operand type.
    """
    memory = work.bytes / gpu.memory_bandwidth
    compute = work.flops / (gpu.tflops[work.dtype] * 1e12)
    return Bound(memory, "memory") if memory >= compute else Bound(compute, "compute")


def read_measurements(paths: Iterable[Path]) -> Measurements:
    """Reads files that ``benchmarks/gpu/run.py`` wrote; a later one wins."""
    found: Measurements = {}
    for path in paths:
        document = json.loads(path.read_text())
        for case, values in document["cases"].items():
            found[document["gpu"], case] = Measured(
                values["seconds"], values.get("baseline_seconds"), values["max_error"]
            )
    return found


def case_key(case: KernelCase) -> str:
    """How files of measurements name a case."""
    return f"{case.op}/{case.backend}/{case.name}"
