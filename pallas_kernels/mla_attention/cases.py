"""Shipped shapes of the latent attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.kernel_case import KernelCase, Limits, Work
from pallas_kernels.kv_write.cases import generations_for
from pallas_kernels.mla_attention import reference, triton, tuning, xla

r, d, SLOTS = 512, 64, 16


@dataclass(frozen=True)
class Shape:
    """A model's heads and a step: R rows of ``tokens`` tokens and ``context`` slots each."""

    model: str
    H: int
    R: int
    context: int
    dtype: str = "bfloat16"
    tokens: int = 1
    quick: bool = False


SHAPES = (
    Shape("deepseek-v2-lite", 16, 64, 4096, quick=True),
    Shape("deepseek-v2-lite", 16, 64, 4096, "float8_e4m3fn"),
    Shape("deepseek-v2-lite", 16, 64, 4096, "int8"),
    Shape("deepseek-v2-lite", 16, 8, 4096),
    Shape("deepseek-v3", 128, 64, 4096, quick=True),
    Shape("deepseek-v3", 128, 64, 4096, "float8_e4m3fn"),
    Shape("deepseek-v3", 128, 8, 4096, tokens=4),
)


def kernel_cases() -> tuple[KernelCase, ...]:
    """Every shipped case of this op."""
    return tuple(_case(shape) for shape in SHAPES)


def _inputs(shape: Shape, key: jax.Array) -> tuple[jax.Array, ...]:
    keys = jax.random.split(key, 5)
    T, M = shape.R * shape.tokens, shape.context // SLOTS
    N = shape.R * M + 1
    quantized = jnp.dtype(shape.dtype).itemsize == 1
    step = 0.03 if shape.dtype == "int8" else 0.01

    def pool(key: jax.Array, width: int) -> jax.Array:
        x = jax.random.normal(key, (N, 1, SLOTS, width), jnp.bfloat16)
        return (
            jnp.clip(jnp.round(x / step), -127, 127).astype(shape.dtype)
            if quantized
            else x.astype(shape.dtype)
        )

    q = [jax.random.normal(k, (T, shape.H, width), jnp.bfloat16) * 0.3 for k, width in zip(keys[:2], (r, d))]
    table_RM = 1 + jax.random.permutation(keys[2], N - 1).reshape(shape.R, M).astype(jnp.int32)
    start_Q = jnp.arange(shape.R + 1, dtype=jnp.int32) * shape.tokens
    context_R = jnp.full(shape.R, shape.context, jnp.int32)
    scales = [jnp.full(1, step, jnp.float32)] * 2 if quantized else []
    return *q, pool(keys[3], r), pool(keys[4], d), table_RM, start_Q, context_R, *scales


def _keywords(arrays: tuple[jax.Array, ...]) -> dict[str, Any]:
    return {"scale": (128 + d) ** -0.5, **dict(zip(("latent_scale_K", "rope_scale_K"), arrays))}


def _oracle(*arrays: jax.Array) -> jax.Array:
    """The reference, row by row: it forms the keys and values of every token."""
    q_latent_THr, q_rope_THd, latent_NKSr, rope_NKSd, table_RM, _, context_R = arrays[:7]
    tokens = q_latent_THr.shape[0] // table_RM.shape[0]

    def row(i: jax.Array) -> jax.Array:
        return reference.mla_attention(
            jax.lax.dynamic_slice_in_dim(q_latent_THr, i * tokens, tokens),
            jax.lax.dynamic_slice_in_dim(q_rope_THd, i * tokens, tokens),
            latent_NKSr,
            rope_NKSd,
            table_RM[i][None],
            jnp.asarray([0, tokens], jnp.int32),
            context_R[i][None],
            **_keywords(arrays[7:]),
        )

    return jax.lax.map(row, jnp.arange(table_RM.shape[0])).reshape(q_latent_THr.shape)


def _case(shape: Shape) -> KernelCase:
    slots, T, size = shape.R * shape.context, shape.R * shape.tokens, jnp.dtype(shape.dtype).itemsize
    operand: Literal["bf16"] = "bf16"

    def build(generation: Generation, choice: Any | None) -> Callable[..., Any]:
        return lambda *a: triton.mla_attention(
            *a[:7], **_keywords(a[7:]), generation=generation, choice=choice
        )

    return KernelCase(
        op="mla_attention",
        name=f"{shape.model}-{shape.dtype}-b{shape.R}-t{shape.tokens}-c{shape.context}",
        backend="triton",
        generations=generations_for(shape.dtype),
        build=build,
        oracle=_oracle,
        baseline=lambda *a: xla.mla_attention(*a[:7], **_keywords(a[7:])),
        inputs=lambda key: _inputs(shape, key),
        work=Work(
            bytes=slots * (r + d) * size + 2 * T * shape.H * (2 * r + d),
            flops=2 * T * shape.context * shape.H * (2 * r + d),
            dtype=operand,
        ),
        tolerance=2e-2,
        limits=Limits(tensor_core="mma"),
        candidates=tuning.candidates("hopper", shape.H, r, "bfloat16", shape.dtype, T),
        tuning_key=tuning.key(shape.H, r, shape.dtype, T),
        quick=shape.quick,
    )
