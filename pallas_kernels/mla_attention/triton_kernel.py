"""The kernels of the latent attention: a tile of heads over a share of the context, and the merge of shares."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.mla_attention.tokens import Tokens
from pallas_kernels.mla_attention.tuning import Choice

# Smaller than any score, and finite: a maximum that nothing has been compared to needs no special case.
LOWEST = float(jnp.finfo(jnp.float32).min)
# A share of the context is at least this long, so that short contexts are not split for nothing.
LEAST_SHARE = 256
LOG2_E = 1.4426950408889634
Ref = Any


class Inputs(NamedTuple):
    """Arrays of a launch, and references to them in the kernel; see ``reference``."""

    q_latent_THr: Ref
    q_rope_THd: Ref
    latent_NKSr: Ref
    rope_NKSd: Ref
    block_table_RM: Ref
    tokens: Tokens
    latent_scale_K: Ref | None
    rope_scale_K: Ref | None
    ancestors_TU: Ref | None


@dataclass(frozen=True)
class Spec:
    """What a kernel is specialised for."""

    choice: Choice
    scale: float


class State(NamedTuple):
    """Online softmax in base 2 (Milakov and Gimelshein 2018, arXiv:1805.02867) of the tile's heads."""

    top_B: jax.Array
    sum_B: jax.Array
    out_Br: jax.Array


class _Share(NamedTuple):
    """Scalars of a program: chunks ``first`` to ``end`` of a row are added, of which slots below ``length`` count: all
    below ``solid``, the others by the tree mask of the token."""

    token: jax.Array
    row: jax.Array
    length: jax.Array
    solid: jax.Array
    first: jax.Array
    end: jax.Array


def attend(ins: Inputs, out_THr: Ref, *, spec: Spec) -> None:
    """The whole context of one token."""
    tile, token = pl.program_id(0), pl.program_id(1)
    head_B = tile * spec.choice.heads + jnp.arange(spec.choice.heads)
    state = _attend(ins, token, head_B, _share(ins, token, jnp.int32(0), spec), spec)
    out_Br = state.out_Br / jnp.where(state.sum_B == 0, 1.0, state.sum_B)[:, None]
    lane_r, mask_Br = _lanes(out_THr.shape[1:], head_B)
    at = out_THr.at[token, head_B[:, None], lane_r[None, :]]
    plgpu.store(at, out_Br.astype(out_THr.dtype), mask=mask_Br)


def attend_share(ins: Inputs, out_XTHr: Ref, top_XTH: Ref, sum_XTH: Ref, *, spec: Spec) -> None:
    """A share of the context of one token; where it is empty, the sum is 0 and the output is not written."""
    tile, token, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head_B = tile * spec.choice.heads + jnp.arange(spec.choice.heads)
    share = _share(ins, token, split, spec)
    state = _attend(ins, token, head_B, share, spec)
    real_B = head_B < sum_XTH.shape[2]
    plgpu.store(top_XTH.at[split, token, head_B], state.top_B, mask=real_B)
    plgpu.store(sum_XTH.at[split, token, head_B], state.sum_B, mask=real_B)

    @pl.when(share.first < share.end)
    def _() -> None:
        lane_r, mask_Br = _lanes(out_XTHr.shape[2:], head_B)
        at = out_XTHr.at[split, token, head_B[:, None], lane_r[None, :]]
        plgpu.store(at, state.out_Br, mask=mask_Br)


def merge(out_XTHr: Ref, top_XTH: Ref, sum_XTH: Ref, out_THr: Ref, *, splits: int) -> None:
    """Adds the shares of one token and head, in the order of the context."""
    token, head = pl.program_id(0) // out_THr.shape[1], pl.program_id(0) % out_THr.shape[1]
    share_X = jnp.arange(splits)
    sum_X = plgpu.load(sum_XTH.at[share_X, token, head])
    top_X = plgpu.load(top_XTH.at[share_X, token, head])
    filled_X = sum_X != 0
    weight_X = jnp.where(filled_X, jnp.exp2(top_X - jnp.max(jnp.where(filled_X, top_X, LOWEST))), 0.0)
    lane_r, mask_Xr = _lanes((splits, out_THr.shape[2]), share_X)
    at = out_XTHr.at[share_X[:, None], token, head, lane_r[None, :]]
    out_Xr = plgpu.load(at, mask=mask_Xr & filled_X[:, None], other=0.0)
    total = jnp.sum(sum_X * weight_X)
    out_r = jnp.sum(out_Xr * weight_X[:, None], axis=0) / jnp.where(total == 0, 1.0, total)
    plgpu.store(out_THr.at[token, head, lane_r], out_r.astype(out_THr.dtype), mask=lane_r < out_THr.shape[2])


def _share(ins: Inputs, token: jax.Array, split: jax.Array, spec: Spec) -> _Share:
    slots = spec.choice.slots
    length = ins.tokens.length_T[token]
    chunks = pl.cdiv(length, slots)
    size = jnp.maximum(pl.cdiv(chunks, spec.choice.splits), max(1, LEAST_SHARE // slots))
    first = jnp.minimum(split * size, chunks)
    end = jnp.minimum(first + size, chunks)
    return _Share(token, ins.tokens.row_T[token], length, ins.tokens.solid_T[token], first, end)


def _attend(ins: Inputs, token: jax.Array, head_B: jax.Array, share: _Share, spec: Spec) -> State:
    q_latent_Br, q_rope_Bd = (_load_heads(q, token, head_B) for q in (ins.q_latent_THr, ins.q_rope_THd))
    factor = jnp.float32(spec.scale * LOG2_E)
    latent_scale = jnp.float32(1) if ins.latent_scale_K is None else ins.latent_scale_K[0]
    rope_scale = jnp.float32(1) if ins.rope_scale_K is None else ins.rope_scale_K[0]
    B, r = q_latent_Br.shape
    state = State(jnp.full(B, LOWEST), jnp.zeros(B), jnp.zeros((B, r), jnp.float32))
    step = partial(
        _step,
        ins=ins,
        queries=(q_latent_Br, q_rope_Bd),
        factors=(factor * latent_scale, factor * rope_scale),
        share=share,
        slots=spec.choice.slots,
    )
    state = jax.lax.fori_loop(share.first, share.end, step, state)
    return State(state.top_B, state.sum_B, state.out_Br * latent_scale)


def _step(
    chunk: jax.Array,
    state: State,
    *,
    ins: Inputs,
    queries: tuple[jax.Array, jax.Array],
    factors: tuple[jax.Array, jax.Array],
    share: _Share,
    slots: int,
) -> State:
    """Adds a chunk of the context.

    Past the end of the context the last slot is read again: so every load is one of a slot that the row owns, and
    needs no mask, which would cost registers. The scores are masked.
    """
    N, _, S, _ = ins.latent_NKSr.shape
    slot_C = chunk * slots + jnp.arange(slots)
    seen_C = slot_C < share.length if ins.ancestors_TU is None else _seen(ins.ancestors_TU, slot_C, share)
    slot_C = jnp.minimum(slot_C, share.length - 1)
    block_C = jnp.clip(plgpu.load(ins.block_table_RM.at[share.row, slot_C // S]), 0, N - 1)
    compute = queries[0].dtype
    latent_Cr, rope_Cd = (
        _load_slots(pool, block_C, slot_C % S).astype(compute) for pool in (ins.latent_NKSr, ins.rope_NKSd)
    )
    s_BC = _dot(queries[0], latent_Cr, transpose=True) * factors[0]
    s_BC = s_BC + _dot(queries[1], rope_Cd, transpose=True) * factors[1]
    s_BC = jnp.where(seen_C[None, :], s_BC, -jnp.inf)
    top_B = jnp.maximum(state.top_B, jnp.max(s_BC, axis=1))
    p_BC = jnp.exp2(s_BC - top_B[:, None])
    keep_B = jnp.exp2(state.top_B - top_B)
    out_Br = state.out_Br * keep_B[:, None] + _dot(p_BC.astype(compute), latent_Cr, transpose=False)
    return State(top_B, state.sum_B * keep_B + jnp.sum(p_BC, axis=1), out_Br)


def _seen(ancestors_TU: Ref, slot_C: jax.Array, share: _Share) -> jax.Array:
    """Which slots a token sees that may be one of a tree."""
    words = ancestors_TU.shape[1]
    node_C = slot_C - share.solid
    in_tree_C = (node_C >= 0) & (slot_C < share.length) & (node_C < 32 * words)
    word_C = jnp.clip(jnp.right_shift(node_C, 5), 0, words - 1)
    bits_C = plgpu.load(ancestors_TU.at[share.token, word_C], mask=in_tree_C, other=0)
    return (node_C < 0) | (jnp.right_shift(bits_C, node_C & 31) & 1 == 1)


def _lanes(shape: tuple[int, int], row_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lanes for the last axis of ``shape``, a power of two of them, and the mask of what exists of rows and lanes."""
    lane = jnp.arange(pl.next_power_of_2(shape[1]))
    return lane, (row_B < shape[0])[:, None] & (lane < shape[1])[None, :]


def _load_heads(q_THe: Ref, token: jax.Array, head_B: jax.Array) -> jax.Array:
    lane_e, mask_Be = _lanes(q_THe.shape[1:], head_B)
    return plgpu.load(q_THe.at[token, head_B[:, None], lane_e[None, :]], mask=mask_Be, other=0.0)


def _load_slots(pool_NKSe: Ref, block_C: jax.Array, offset_C: jax.Array) -> jax.Array:
    """Slots as ``[C, e]``; 0 past the width e."""
    e = pool_NKSe.shape[3]
    lane_e = jnp.arange(pl.next_power_of_2(e))
    at = pool_NKSe.at[block_C[:, None], 0, offset_C[:, None], lane_e[None, :]]
    if lane_e.shape[0] == e:
        return plgpu.load(at)
    mask_Ce = jnp.broadcast_to(lane_e < e, (offset_C.shape[0], lane_e.shape[0]))
    return plgpu.load(at, mask=mask_Ce, other=0 if pool_NKSe.dtype == jnp.int8 else 0.0)


def _dot(a: jax.Array, b: jax.Array, transpose: bool) -> jax.Array:
    """A product accumulated in float32; float32 operands are not rounded to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((1,), (1 if transpose else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
