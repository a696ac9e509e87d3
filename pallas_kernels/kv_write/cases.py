"""Shipped shapes of the KV write."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.kernel_case import KernelCase, Limits, Work
from pallas_kernels.kv_write import reference, triton, tuning, xla

ALL: tuple[Generation, ...] = ("ampere", "ada", "hopper")
# One unit in the last place, or one step of quantization at the top of the range, relative to the largest value.
ONE_STEP = {
    "bfloat16": 2**-7,
    "float16": 2**-10,
    "int8": 1 / 120,
    "float8_e4m3fn": 1 / 13,
    "float8_e5m2": 1 / 6.9,
}
SLOTS, BLOCKS = 16, 4096


@dataclass(frozen=True)
class Shape:
    """A model's cache and a step: K heads of h values, T tokens."""

    model: str
    step: str
    K: int
    h: int
    T: int
    dtype: str = "bfloat16"
    quick: bool = False


SHAPES = (
    # Qwen3-0.6B has the cache heads of Llama-3-8B.
    Shape("llama3-8b", "decode", 8, 128, 64, quick=True),
    Shape("llama3-8b", "decode", 8, 128, 256),
    Shape("llama3-8b", "prefill", 8, 128, 2048),
    Shape("llama3-8b", "decode", 8, 128, 64, "int8", quick=True),
    Shape("llama3-8b", "prefill", 8, 128, 2048, "int8"),
    Shape("llama3-8b", "decode", 8, 128, 256, "float8_e4m3fn", quick=True),
    Shape("llama3-8b", "prefill", 8, 128, 2048, "float8_e4m3fn"),
    Shape("llama3-8b", "decode", 8, 128, 256, "float8_e5m2"),
    Shape("qwen2.5-0.5b", "decode", 2, 64, 256),
    Shape("phi-2", "decode", 32, 80, 64),
    Shape("gemma2-2b", "prefill", 4, 256, 2048),
)


def kernel_cases() -> tuple[KernelCase, ...]:
    """Every shipped case of this op."""
    return tuple(_case(shape) for shape in SHAPES)


def generations_for(dtype: str) -> tuple[Generation, ...]:
    """The generations whose kernels can write a cache of ``dtype``."""
    return tuple(g for g in ALL if (dtype, g) != ("float8_e4m3fn", "ampere"))


def scales_of(shape: Shape) -> jax.Array:
    """Scales with which values of unit variance use most of the range of a quantized cache."""
    top = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}.get(shape.dtype, 1.0)
    return jnp.linspace(4.0, 6.0, shape.K, dtype=jnp.float32) / top


def slots_of(key: jax.Array, T: int) -> jax.Array:
    """Distinct slots outside block 0."""
    return jax.random.permutation(key, (BLOCKS - 1) * SLOTS)[:T].astype(jnp.int32) + SLOTS


def _case(shape: Shape) -> KernelCase:
    values = shape.T * shape.K * shape.h
    size = jnp.dtype(shape.dtype).itemsize

    def build(generation: Generation, choice: Any | None) -> Callable[..., Any]:
        def run(*args: jax.Array) -> Any:
            *arrays, k_scale_K, v_scale_K = args
            return triton.kv_write(
                *arrays, k_scale_K=k_scale_K, v_scale_K=v_scale_K, generation=generation, choice=choice
            )

        return run

    def inputs(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        pool = jnp.zeros((BLOCKS, shape.K, SLOTS, shape.h), shape.dtype)
        k, v = (jax.random.normal(k, (shape.T, shape.K, shape.h), jnp.bfloat16) for k in keys[:2])
        return pool, pool + 0, k, v, slots_of(keys[2], shape.T), scales_of(shape), scales_of(shape)

    return KernelCase(
        op="kv_write",
        name=f"{shape.model}-{shape.step}-{shape.dtype}-t{shape.T}",
        backend="triton",
        generations=generations_for(shape.dtype),
        build=build,
        oracle=lambda *a: reference.kv_write(*a[:5], k_scale_K=a[5], v_scale_K=a[6]),
        baseline=lambda *a: xla.kv_write(*a[:5], k_scale_K=a[5], v_scale_K=a[6]),
        inputs=inputs,
        work=Work(bytes=2 * values * (2 + size) + 4 * shape.T, flops=2 * values, dtype="fp32"),
        tolerance=ONE_STEP[shape.dtype],
        limits=Limits(registers=128, tensor_core=None, temp_bytes=1 << 16),
        candidates=tuning.candidates("hopper", shape.K, shape.h, shape.dtype, shape.T),
        tuning_key=tuning.key(shape.K, shape.h, shape.dtype, shape.T),
        donate=(0, 1),
        quick=shape.quick,
    )
