"""A shipped kernel on one shape: what ahead-of-time compilation, GPU benchmarks, tuning and the docs share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from pallas_kernels.gpus import Generation


@dataclass(frozen=True)
class Work:
    """What a kernel must do at least, whatever its implementation: the two axes of a roofline.

    Attributes:
        bytes: read from and written to device memory, each operand once.
        flops: operations; a multiply-add counts two.
        dtype: operand type of the products, a key of ``Gpu.tflops``.
    """

    bytes: int
    flops: int
    dtype: Literal["bf16", "fp16", "fp8", "int8", "tf32", "fp32"] = "bf16"


@dataclass(frozen=True)
class Limits:
    """What the compiled kernels of a case may use. Spills are never allowed.

    Attributes:
        registers: per thread.
        tensor_core: instruction that must appear in one of the kernels; None if none is expected.
        temp_bytes: buffers that XLA allocates for the call; None: not checked.
    """

    registers: int = 255
    tensor_core: Literal["mma", "wgmma"] | None = "mma"
    temp_bytes: int | None = None


@dataclass(frozen=True)
class KernelCase:
    """One kernel, one shape, one tuning choice.

    Attributes:
        op: folder of the op.
        name: of the shape, unique in its op and backend: ``decode-bf16-h128-g4-b64-c4096``.
        backend: ``triton`` or ``mosaic``.
        generations: GPUs for which it is shipped.
        build: the jittable function of the arrays in ``inputs``, for a generation and a tuning choice (None: the
            table's).
        oracle: the reference, of the same arrays.
        baseline: the XLA path, of the same arrays; None if it cannot serve the case.
        inputs: the arrays (or pytrees of them) made from a key by traceable jax.numpy code, so that
            ``jax.eval_shape`` gives their shapes without making them.
        work: least bytes and operations.
        tolerance: largest difference to the oracle, relative to its largest magnitude.
        limits: of the compiled kernels.
        candidates: tuning choices that are worth measuring, those of the table included: dataclasses, whose fields
            become an entry of the table.
        tuning_key: of the case's shape in the op's ``tuning.json``, what ``tuning.key`` gives; cases with
            ``candidates`` need it, or the tuning script has no place to write the best one to.
        donate: arguments that are updated in place.
        quick: belongs to the subset that every change is checked with.
    """

    op: str
    name: str
    backend: Literal["triton", "mosaic"]
    generations: tuple[Generation, ...]
    build: Callable[[Generation, Any | None], Callable[..., Any]]
    oracle: Callable[..., Any]
    inputs: Callable[[jax.Array], tuple[Any, ...]]
    work: Work
    tolerance: float
    baseline: Callable[..., Any] | None = None
    limits: Limits = field(default_factory=Limits)
    candidates: tuple[Any, ...] = ()
    tuning_key: str | None = None
    donate: tuple[int, ...] = ()
    quick: bool = False
