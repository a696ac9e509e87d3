"""Shipped shapes of norm and quantization: the two norms of a decoder layer with 8-bit activations."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.kernel_case import KernelCase, Limits, Work
from pallas_kernels.quantize_rows.cases import GENERATIONS, ONE_STEP
from pallas_kernels.quantized_matmul.weights import Activation
from pallas_kernels.rms_norm_quantize import reference, triton, tuning, xla

EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """T rows of a model of width D."""

    model: str
    D: int
    T: int
    to: Activation
    residual: bool = True
    quick: bool = False


SHAPES = (
    Shape("llama3-8b", 4096, 64, "fp8", quick=True),
    Shape("llama3-8b", 4096, 2048, "fp8"),
    Shape("llama3-8b", 4096, 64, "fp8", residual=False),
    Shape("llama3-8b", 4096, 2048, "int8", quick=True),
    Shape("llama3-70b", 8192, 64, "fp8"),
    Shape("qwen2.5-0.5b", 896, 64, "int8"),
)


def kernel_cases() -> tuple[KernelCase, ...]:
    """Every shipped case of this op."""
    return tuple(_case(shape) for shape in SHAPES)


def _case(shape: Shape) -> KernelCase:
    options: dict[str, Any] = {"eps": EPS, "to": shape.to}

    def build(generation: Generation, choice: Any | None) -> Callable[..., Any]:
        return partial(triton.rms_norm_quantize, generation=generation, choice=choice, **options)

    def inputs(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        rows = [jax.random.normal(k, (shape.T, shape.D), jnp.bfloat16) for k in keys[: 1 + shape.residual]]
        return rows[0], 1 + 0.1 * jax.random.normal(keys[2], (shape.D,)), *rows[1:]

    row_bytes = 2 + 1 + (4 if shape.residual else 0)
    return KernelCase(
        op="rms_norm_quantize",
        name=f"{shape.model}-{shape.to}-t{shape.T}" + ("-residual" if shape.residual else ""),
        backend="triton",
        generations=GENERATIONS[shape.to],
        build=build,
        oracle=partial(reference.rms_norm_quantize, **options),
        baseline=partial(xla.rms_norm_quantize, **options),
        inputs=inputs,
        work=Work(
            bytes=shape.T * (shape.D * row_bytes + 4) + 4 * shape.D, flops=8 * shape.T * shape.D, dtype="fp32"
        ),
        tolerance=ONE_STEP[shape.to],
        limits=Limits(registers=128, tensor_core=None, temp_bytes=1 << 16),
        candidates=tuning.candidates("hopper", shape.D, jnp.dtype(jnp.bfloat16)),
        tuning_key=tuning.key(shape.D, jnp.dtype(jnp.bfloat16)),
        quick=shape.quick,
    )
