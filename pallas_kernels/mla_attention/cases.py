"""Shipped shapes of the latent attention."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
    """A model's heads and a step: R rows of ``tokens`` tokens and ``context`` slots each.

    With ``trees`` every row is a tree of drafts, two chains from the first token on; then the cache is not quantized.
    """

    model: str
    H: int
    R: int
    context: int
    dtype: str = "bfloat16"
    tokens: int = 1
    quick: bool = False
    trees: bool = False


SHAPES = (
    Shape("deepseek-v2-lite", 16, 64, 4096, quick=True),
    Shape("deepseek-v2-lite", 16, 64, 4096, "float8_e4m3fn"),
    Shape("deepseek-v2-lite", 16, 64, 4096, "int8"),
    Shape("deepseek-v2-lite", 16, 8, 4096),
    Shape("deepseek-v3", 128, 64, 4096, quick=True),
    Shape("deepseek-v3", 128, 64, 4096, "float8_e4m3fn"),
    Shape("deepseek-v3", 128, 8, 4096, tokens=4),
    Shape("deepseek-v3", 128, 4, 4096, tokens=16, trees=True),
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
    more = [jnp.full(1, step, jnp.float32)] * 2 if quantized else []
    if shape.trees:
        more = [jnp.tile(_two_chains(shape.tokens), shape.R)[:, None]]
    return *q, pool(keys[3], r), pool(keys[4], d), table_RM, start_Q, context_R, *more


def _two_chains(tokens: int) -> jax.Array:
    """Masks of a tree of which even and odd nodes are a chain each, both behind the first node."""
    node = jnp.arange(tokens)
    ancestor_tt = (node[None, :] <= node[:, None]) & ((node[None, :] - node[:, None]) % 2 == 0)
    return jnp.sum((ancestor_tt | (node[None, :] == 0)) << node, axis=1, dtype=jnp.int32)


def _keywords(shape: Shape, arrays: tuple[jax.Array, ...]) -> dict[str, Any]:
    names = ("ancestors_TU",) if shape.trees else ("latent_scale_K", "rope_scale_K")
    return {"scale": (128 + d) ** -0.5, **dict(zip(names, arrays))}


def _oracle(shape: Shape, *arrays: jax.Array) -> jax.Array:
    """The reference, row by row: it forms the keys and values of every token."""
    q_latent_THr, q_rope_THd, latent_NKSr, rope_NKSd, table_RM, _, context_R = arrays[:7]
    tokens = q_latent_THr.shape[0] // table_RM.shape[0]

    def row(i: jax.Array) -> jax.Array:
        more = arrays[7:]
        if shape.trees:
            more = (jax.lax.dynamic_slice_in_dim(more[0], i * tokens, tokens),)
        return reference.mla_attention(
            jax.lax.dynamic_slice_in_dim(q_latent_THr, i * tokens, tokens),
            jax.lax.dynamic_slice_in_dim(q_rope_THd, i * tokens, tokens),
            latent_NKSr,
            rope_NKSd,
            table_RM[i][None],
            jnp.asarray([0, tokens], jnp.int32),
            context_R[i][None],
            **_keywords(shape, more),
        )

    return jax.lax.map(row, jnp.arange(table_RM.shape[0])).reshape(q_latent_THr.shape)


def _case(shape: Shape) -> KernelCase:
    slots, T, size = shape.R * shape.context, shape.R * shape.tokens, jnp.dtype(shape.dtype).itemsize
    operand: Literal["bf16"] = "bf16"

    def build(generation: Generation, choice: Any | None) -> Callable[..., Any]:
        return lambda *a: triton.mla_attention(
            *a[:7], **_keywords(shape, a[7:]), generation=generation, choice=choice
        )

    return KernelCase(
        op="mla_attention",
        name=f"{shape.model}-{shape.dtype}-b{shape.R}-t{shape.tokens}{'-tree' * shape.trees}-c{shape.context}",
        backend="triton",
        generations=generations_for(shape.dtype),
        build=build,
        oracle=partial(_oracle, shape),
        baseline=lambda *a: xla.mla_attention(*a[:7], **_keywords(shape, a[7:])),
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
