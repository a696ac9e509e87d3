"""Shipped shapes of the fused rotary embedding and KV write."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.kernel_case import KernelCase, Limits, Work
from pallas_kernels.kv_write.cases import BLOCKS, ONE_STEP, SLOTS, generations_for, slots_of
from pallas_kernels.rope_kv_write import reference, triton, tuning, xla


@dataclass(frozen=True)
class Shape:
    """A model's heads and a step: H query and K cache heads of h values, ``rotary`` of them rotated, T tokens."""

    model: str
    step: str
    H: int
    K: int
    h: int
    rotary: int
    norms: bool
    T: int
    dtype: str = "bfloat16"
    quick: bool = False


SHAPES = (
    Shape("llama3-8b", "decode", 32, 8, 128, 128, False, 64, quick=True),
    Shape("llama3-8b", "decode", 32, 8, 128, 128, False, 256),
    Shape("llama3-8b", "prefill", 32, 8, 128, 128, False, 2048),
    Shape("llama3-8b", "decode", 32, 8, 128, 128, False, 64, "int8"),
    Shape("llama3-8b", "decode", 32, 8, 128, 128, False, 256, "float8_e4m3fn", quick=True),
    Shape("llama3-8b", "decode", 32, 8, 128, 128, False, 256, "float8_e5m2"),
    Shape("qwen3-0.6b", "decode", 16, 8, 128, 128, True, 64),
    Shape("qwen3-0.6b", "decode", 16, 8, 128, 128, True, 256, quick=True),
    Shape("qwen3-0.6b", "prefill", 16, 8, 128, 128, True, 2048),
    Shape("qwen3-0.6b", "prefill", 16, 8, 128, 128, True, 2048, "int8"),
    Shape("qwen2.5-0.5b", "decode", 14, 2, 64, 64, False, 256),
    Shape("phi-2", "decode", 32, 32, 80, 32, False, 64),
    Shape("gemma2-2b", "prefill", 8, 4, 256, 256, False, 2048),
)


def kernel_cases() -> tuple[KernelCase, ...]:
    """Every shipped case of this op."""
    return tuple(_case(shape) for shape in SHAPES)


def _keywords(shape: Shape, arrays: tuple[jax.Array, ...]) -> dict[str, Any]:
    names = ("k_scale_K", "v_scale_K", *(("q_norm_h", "k_norm_h") if shape.norms else ()))
    return dict(zip(names, arrays))


def _inputs(shape: Shape, key: jax.Array) -> tuple[jax.Array, ...]:
    T, A, h = shape.T, shape.H + 2 * shape.K, shape.h
    keys = jax.random.split(key, 4)
    angle_Ti = jax.random.uniform(keys[0], (T, shape.rotary // 2), maxval=6.28)
    top = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}.get(shape.dtype, 1.0)
    scale_K = jnp.linspace(4.0, 6.0, shape.K, dtype=jnp.float32) / top
    norms = (
        [1 + 0.1 * jax.random.normal(k, (h,)) for k in jax.random.split(keys[1], 2)] if shape.norms else []
    )
    pool = jnp.zeros((BLOCKS, shape.K, SLOTS, h), shape.dtype)
    qkv_TAh = jax.random.normal(keys[2], (T, A, h), jnp.bfloat16)
    slot_T = slots_of(keys[3], T)
    return qkv_TAh, jnp.cos(angle_Ti), jnp.sin(angle_Ti), pool, pool + 0, slot_T, scale_K, scale_K, *norms


def _case(shape: Shape) -> KernelCase:
    A = shape.H + 2 * shape.K
    values, cached = shape.T * A * shape.h, 2 * shape.T * shape.K * shape.h
    queries = shape.T * shape.H * shape.h
    size = jnp.dtype(shape.dtype).itemsize

    def build(generation: Generation, choice: Any | None) -> Callable[..., Any]:
        return lambda *a: triton.rope_kv_write(
            *a[:6], **_keywords(shape, a[6:]), generation=generation, choice=choice
        )

    return KernelCase(
        op="rope_kv_write",
        name=f"{shape.model}-{shape.step}-{shape.dtype}-t{shape.T}",
        backend="triton",
        generations=generations_for(shape.dtype),
        build=build,
        oracle=lambda *a: reference.rope_kv_write(*a[:6], **_keywords(shape, a[6:])),
        baseline=lambda *a: xla.rope_kv_write(*a[:6], **_keywords(shape, a[6:])),
        inputs=lambda key: _inputs(shape, key),
        work=Work(
            bytes=2 * values + 2 * queries + size * cached + 4 * shape.T * (1 + shape.rotary),
            flops=6 * values,
            dtype="fp32",
        ),
        tolerance=ONE_STEP[shape.dtype],
        limits=Limits(registers=128, tensor_core=None, temp_bytes=1 << 16),
        candidates=tuning.candidates("hopper", A, shape.h, shape.dtype, shape.T),
        tuning_key=tuning.key(A, shape.h, shape.dtype, shape.T),
        donate=(3, 4),
        quick=shape.quick,
    )
