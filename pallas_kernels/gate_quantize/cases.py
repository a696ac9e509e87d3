"""Shipped shapes of gate and quantization: the MLPs of models with 8-bit activations."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gate.reference import GateActivation
from pallas_kernels.gate_quantize import reference, triton, tuning, xla
from pallas_kernels.gpus import Generation
from pallas_kernels.kernel_case import KernelCase, Limits, Work
from pallas_kernels.quantize_rows.cases import GENERATIONS, ONE_STEP
from pallas_kernels.quantized_matmul.weights import Activation


@dataclass(frozen=True)
class Shape:
    """T rows of an MLP of width F."""

    model: str
    F: int
    T: int
    to: Activation
    activation: GateActivation = "silu"
    quick: bool = False


SHAPES = (
    Shape("llama3-8b", 14336, 64, "fp8", quick=True),
    Shape("llama3-8b", 14336, 2048, "fp8"),
    Shape("llama3-8b", 14336, 2048, "int8", quick=True),
    Shape("llama3-70b", 28672, 64, "fp8"),
    Shape("qwen2.5-0.5b", 4864, 64, "int8"),
    Shape("gemma2-2b", 9216, 64, "fp8", "gelu_tanh"),
)


def kernel_cases() -> tuple[KernelCase, ...]:
    """Every shipped case of this op."""
    return tuple(_case(shape) for shape in SHAPES)


def _case(shape: Shape) -> KernelCase:
    options: dict[str, Any] = {"activation": shape.activation, "to": shape.to}
    dtype = jnp.dtype(jnp.bfloat16)

    def build(generation: Generation, choice: Any | None) -> Callable[..., Any]:
        return partial(triton.gate_quantize, generation=generation, choice=choice, **options)

    return KernelCase(
        op="gate_quantize",
        name=f"{shape.model}-{shape.activation}-{shape.to}-t{shape.T}",
        backend="triton",
        generations=GENERATIONS[shape.to],
        build=build,
        oracle=partial(reference.gate_quantize, **options),
        baseline=partial(xla.gate_quantize, **options),
        inputs=lambda key: (jax.random.normal(key, (shape.T, 2 * shape.F), dtype),),
        work=Work(bytes=shape.T * (5 * shape.F + 4), flops=10 * shape.T * shape.F, dtype="fp32"),
        tolerance=ONE_STEP[shape.to],
        limits=Limits(registers=168, tensor_core=None, temp_bytes=1 << 16),
        candidates=tuning.candidates("hopper", shape.F, dtype),
        tuning_key=tuning.key(shape.F, dtype),
        quick=shape.quick,
    )
