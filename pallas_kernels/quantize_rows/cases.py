"""Shipped shapes of row quantization: what 8-bit products see of attention outputs and MLPs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.kernel_case import KernelCase, Limits, Work
from pallas_kernels.quantize_rows import reference, triton, tuning, xla
from pallas_kernels.quantized_matmul.weights import Activation

GENERATIONS: dict[Activation, tuple[Generation, ...]] = {
    "fp8": ("ada", "hopper"),
    "int8": ("ampere", "ada", "hopper"),
}
ONE_STEP: dict[Activation, float] = {"fp8": 1 / 14, "int8": 1 / 120}
"""One step of quantization at the top of the range, relative to the largest value."""


@dataclass(frozen=True)
class Shape:
    """T rows of D values."""

    name: str
    D: int
    T: int
    to: Activation
    quick: bool = False


SHAPES = (
    Shape("llama3-8b-attention", 4096, 64, "fp8", quick=True),
    Shape("llama3-8b-attention", 4096, 2048, "fp8"),
    Shape("llama3-8b-mlp", 14336, 2048, "int8", quick=True),
    Shape("llama3-70b-mlp", 28672, 64, "fp8"),
    Shape("qwen2.5-0.5b-attention", 896, 64, "int8"),
)


def kernel_cases() -> tuple[KernelCase, ...]:
    """Every shipped case of this op."""
    return tuple(_case(shape) for shape in SHAPES)


def _case(shape: Shape) -> KernelCase:
    options: dict[str, Any] = {"to": shape.to}
    dtype = jnp.dtype(jnp.bfloat16)

    def build(generation: Generation, choice: Any | None) -> Callable[..., Any]:
        return partial(triton.quantize_rows, generation=generation, choice=choice, **options)

    return KernelCase(
        op="quantize_rows",
        name=f"{shape.name}-{shape.to}-t{shape.T}",
        backend="triton",
        generations=GENERATIONS[shape.to],
        build=build,
        oracle=partial(reference.quantize_rows, **options),
        baseline=partial(xla.quantize_rows, **options),
        inputs=lambda key: (jax.random.normal(key, (shape.T, shape.D), dtype),),
        work=Work(bytes=shape.T * (3 * shape.D + 4), flops=4 * shape.T * shape.D, dtype="fp32"),
        tolerance=ONE_STEP[shape.to],
        limits=Limits(registers=168, tensor_core=None, temp_bytes=1 << 16),
        candidates=tuning.candidates("hopper", shape.D, dtype),
        tuning_key=tuning.key(shape.D, dtype),
        quick=shape.quick,
    )
