"""The body of the fused kernel: every program handles pairs of token and head of either q, k or v."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.kv_write.triton_convert import convert

Ref = Any


@dataclass(frozen=True)
class Config:
    """What the kernel is specialised for.

    Attributes:
        rows: pairs of token and head per program.
        H: query heads; ``qkv`` holds them first.
        q_norm, k_norm: whether there are factors of a norm of q and of k.
        norm_eps: added to the mean square.
    """

    rows: int
    H: int
    q_norm: bool
    k_norm: bool
    norm_eps: float


class _Part(NamedTuple):
    """Features ``first`` to ``first + width`` of a head, on a power of two of lanes."""

    lane_h: jax.Array
    mask_h: jax.Array


class _Rows(NamedTuple):
    """The pairs of token and head of a program, and which of them exist."""

    token_B: jax.Array
    head_B: jax.Array
    real_B: jax.Array


def rotate_and_write(
    k_in: Ref,
    v_in: Ref,
    qkv_TAh: Ref,
    cos_Ti: Ref,
    sin_Ti: Ref,
    slot_T: Ref,
    k_scale_K: Ref,
    v_scale_K: Ref,
    *more: Ref,
    config: Config,
) -> None:
    """See ``triton.rope_kv_write``; the aliased inputs are not read. ``more`` holds the norms' factors and the outputs.

    Programs come in the order q, k, v: as many of each as its pairs need.
    """
    *norms, q_THh, k_NKSh, v_NKSh = more
    q_norm_h = norms[0] if config.q_norm else None
    k_norm_h = norms[-1] if config.k_norm else None
    T, H, h = q_THh.shape
    K = k_NKSh.shape[1]
    i = cos_Ti.shape[1]
    parts = [_part(0, i), _part(i, i), *([_part(2 * i, h - 2 * i)] if 2 * i < h else [])]
    program = pl.program_id(0)
    q_programs, k_programs = pl.cdiv(T * H, config.rows), pl.cdiv(T * K, config.rows)

    def rotated(rows: _Rows, first_head: int, norm_h: Ref | None) -> list[jax.Array]:
        x = [_load(qkv_TAh, rows, first_head, part) for part in parts]
        if norm_h is not None:
            x = _normalised(x, parts, norm_h, h, config.norm_eps)
        return _rotated(x, rows, cos_Ti, sin_Ti, parts[0])

    @pl.when(program < q_programs)
    def _queries() -> None:
        rows = _rows(program, config.rows, T, H)
        for part, x_Bh in zip(parts, rotated(rows, 0, q_norm_h)):
            at = q_THh.at[rows.token_B[:, None], rows.head_B[:, None], part.lane_h[None, :]]
            plgpu.store(at, x_Bh.astype(q_THh.dtype), mask=rows.real_B[:, None] & part.mask_h[None, :])

    @pl.when((program >= q_programs) & (program < q_programs + k_programs))
    def _keys() -> None:
        rows = _rows(program - q_programs, config.rows, T, K)
        _write(k_NKSh, slot_T, k_scale_K, rows, parts, rotated(rows, H, k_norm_h))

    @pl.when(program >= q_programs + k_programs)
    def _values() -> None:
        rows = _rows(program - q_programs - k_programs, config.rows, T, K)
        whole = _part(0, h)
        _write(v_NKSh, slot_T, v_scale_K, rows, [whole], [_load(qkv_TAh, rows, H + K, whole)])


def _part(first: int, width: int) -> _Part:
    lane_h = jnp.arange(1 << math.ceil(math.log2(max(width, 1))))
    return _Part(first + lane_h, lane_h < width)


def _rows(program: jax.Array, rows: int, T: int, heads: int) -> _Rows:
    row_B = program * rows + jnp.arange(rows)
    return _Rows(row_B // heads, row_B % heads, row_B < T * heads)


def _load(qkv_TAh: Ref, rows: _Rows, first_head: int, part: _Part) -> jax.Array:
    at = qkv_TAh.at[rows.token_B[:, None], first_head + rows.head_B[:, None], part.lane_h[None, :]]
    return plgpu.load(at, mask=rows.real_B[:, None] & part.mask_h[None, :], other=0)


def _normalised(x: list[jax.Array], parts: list[_Part], norm_h: Ref, h: int, eps: float) -> list[jax.Array]:
    """Root mean square norm over all parts of a head, rounded to the activations' dtype as the separate op does."""
    wide = [x_Bh.astype(jnp.float32) for x_Bh in x]
    square_B = sum((jnp.sum(x_Bh * x_Bh, axis=1) for x_Bh in wide), jnp.zeros(()))
    inverse_B = jax.lax.rsqrt(square_B / h + eps)
    factors = [plgpu.load(norm_h.at[part.lane_h], mask=part.mask_h, other=0) for part in parts]
    return [
        (x_Bh * inverse_B[:, None] * factor_h[None, :]).astype(old.dtype)
        for x_Bh, factor_h, old in zip(wide, factors, x)
    ]


def _rotated(x: list[jax.Array], rows: _Rows, cos_Ti: Ref, sin_Ti: Ref, part: _Part) -> list[jax.Array]:
    at = (rows.token_B[:, None], part.lane_h[None, :])
    mask_Bi = rows.real_B[:, None] & part.mask_h[None, :]
    cos_Bi = plgpu.load(cos_Ti.at[at], mask=mask_Bi, other=0)
    sin_Bi = plgpu.load(sin_Ti.at[at], mask=mask_Bi, other=0)
    first_Bi, second_Bi = x[0].astype(jnp.float32), x[1].astype(jnp.float32)
    turned = [first_Bi * cos_Bi - second_Bi * sin_Bi, second_Bi * cos_Bi + first_Bi * sin_Bi]
    return [*(x_Bi.astype(x[0].dtype) for x_Bi in turned), *x[2:]]


def _write(
    pool_NKSh: Ref, slot_T: Ref, scale_K: Ref, rows: _Rows, parts: list[_Part], x: list[jax.Array]
) -> None:
    S = pool_NKSh.shape[2]
    slot_B = plgpu.load(slot_T.at[rows.token_B], mask=rows.real_B, other=0)
    scale_B = plgpu.load(scale_K.at[rows.head_B], mask=rows.real_B, other=1)
    block_B, offset_B = slot_B // S, slot_B % S
    for part, x_Bh in zip(parts, x):
        at = pool_NKSh.at[block_B[:, None], rows.head_B[:, None], offset_B[:, None], part.lane_h[None, :]]
        value_Bh = convert(x_Bh, scale_B[:, None], pool_NKSh.dtype)
        plgpu.store(at, value_Bh, mask=rows.real_B[:, None] & part.mask_h[None, :])
