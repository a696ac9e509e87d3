"""One step of the Triton attention: a chunk of the context joins the softmax states of a program's queries."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged_paged_attention.triton_plan import Tiles, Tokens
from pallas_kernels.ragged_paged_attention.tuning import Launch

# An array; in a kernel, a reference to it.
Ref = Any
# Smaller than any score. It is finite, so that a query which has seen nothing yet needs no special case.
LOWEST = float(jnp.finfo(jnp.float32).min)
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@dataclass(frozen=True)
class Scoring:
    """How a product of query and key becomes a logit."""

    scale: float
    window: int | None
    soft_cap: float | None


class Inputs(NamedTuple):
    """Arrays of a launch, and references to them in the kernel; see ``reference``.

    ``share_1`` is the index of a share of the context, ``[1]``; None: the context is whole.
    """

    q_THh: Ref
    k_NKSh: Ref
    v_NKSh: Ref
    block_table_RM: Ref
    tokens: Tokens
    tiles: Tiles
    sinks_H: Ref | None
    k_scale_K: Ref | None
    v_scale_K: Ref | None
    ancestors_TU: Ref | None
    share_1: Ref | None


@dataclass(frozen=True)
class Spec:
    """What is static in a kernel.

    Attributes:
        heads: query heads that a program computes, of the ``group`` ones of its KV head.
        tokens: that a program computes at most.
        width: head width, padded to a power of two.
        shares: of the context, if it is not whole.
    """

    scoring: Scoring
    launch: Launch
    group: int
    heads: int
    tokens: int
    width: int
    compute: jnp.dtype
    shares: int


class Rows(NamedTuple):
    """The queries of a program, one per token and head: ``[r]``."""

    token_r: jax.Array
    head_r: jax.Array
    valid_r: jax.Array
    first_r: jax.Array
    solid_r: jax.Array
    limit_r: jax.Array


class State(NamedTuple):
    """Online softmax in base 2."""

    top_r: jax.Array
    sum_r: jax.Array
    out_rh: jax.Array


class Span(NamedTuple):
    """Scalars of a program: slots from ``first`` to ``end`` of a row are read, those of a head of the pool."""

    row: jax.Array
    kv_head: jax.Array
    first: jax.Array
    end: jax.Array
    prefix: jax.Array


def add_chunk(
    chunk: jax.Array,
    state: State,
    *,
    solid: bool,
    ins: Inputs,
    q_rh: jax.Array,
    rows: Rows,
    span: Span,
    factor: jax.Array,
    spec: Spec,
) -> State:
    """Adds a chunk of the context; ``solid``: every query sees all of it, but for the window."""
    window, soft_cap = spec.scoring.window, spec.scoring.soft_cap
    slot_C = chunk * spec.launch.slots + jnp.arange(spec.launch.slots)
    owned_C = None
    if not solid or window is not None:
        owned_C = (slot_C >= span.first) & (slot_C < span.end)
    page_C = _pages(ins, slot_C, owned_C, span)
    k_Ch = _read(ins.k_NKSh, page_C, slot_C, owned_C, span, spec)
    v_Ch = _read(ins.v_NKSh, page_C, slot_C, owned_C, span, spec)
    s_rC = _dot(q_rh, k_Ch, transpose=True)
    if soft_cap is not None:
        s_rC = jnp.tanh(s_rC * (factor / soft_cap)) * (soft_cap * LOG2_E)
    else:
        s_rC = s_rC * (factor * LOG2_E)
    if owned_C is not None:
        s_rC = jnp.where(_seen(ins, slot_C, rows, span, solid, spec), s_rC, -jnp.inf)
    top_r = jnp.maximum(state.top_r, jnp.max(s_rC, axis=1))
    p_rC = jnp.exp2(s_rC - top_r[:, None])
    keep_r = jnp.exp2(state.top_r - top_r)
    out_rh = state.out_rh * keep_r[:, None] + _dot(p_rC.astype(spec.compute), v_Ch, transpose=False)
    return State(top_r, state.sum_r * keep_r + jnp.sum(p_rC, axis=1), out_rh)


def _seen(ins: Inputs, slot_C: jax.Array, rows: Rows, span: Span, solid: bool, spec: Spec) -> jax.Array:
    """Which slots of a chunk each query sees."""
    slot_1C = slot_C[None, :]
    seen_rC = slot_1C < rows.solid_r[:, None]
    if spec.scoring.window is not None:
        seen_rC &= slot_1C >= rows.first_r[:, None]
    if solid or ins.ancestors_TU is None:
        return seen_rC
    node_1C = _positions(ins, slot_1C, spec) - span.prefix
    words = ins.ancestors_TU.shape[1]
    in_tree_rC = (
        (slot_1C >= rows.solid_r[:, None]) & (slot_1C < rows.limit_r[:, None]) & (node_1C < 32 * words)
    )
    word_1C = jnp.clip(jnp.right_shift(node_1C, 5), 0, words - 1)
    word_rC = plgpu.load(ins.ancestors_TU.at[rows.token_r[:, None], word_1C], mask=in_tree_rC, other=0)
    return seen_rC | (jnp.right_shift(word_rC, node_1C & 31) & 1 == 1)


def _positions(ins: Inputs, slot_1C: jax.Array, spec: Spec) -> jax.Array:
    """As ``Share.positions``."""
    if ins.share_1 is None:
        return slot_1C
    S = ins.k_NKSh.shape[2]
    block_1C = div(slot_1C, S)
    return (block_1C * (spec.shares - 1) + ins.share_1[0]) * S + slot_1C


def _pages(ins: Inputs, slot_C: jax.Array, owned_C: jax.Array | None, span: Span) -> jax.Array:
    N, _, S, _ = ins.k_NKSh.shape
    entry_C = ins.block_table_RM.at[span.row, div(slot_C, S)]
    page_C = plgpu.load(entry_C) if owned_C is None else plgpu.load(entry_C, mask=owned_C, other=0)
    return jnp.clip(page_C, 0, N - 1)


def _read(
    pool_NKSh: Ref,
    page_C: jax.Array,
    slot_C: jax.Array,
    owned_C: jax.Array | None,
    span: Span,
    spec: Spec,
) -> jax.Array:
    """Reads slots of one head as ``[C, h]``; 0 where they are not owned, and past the head width."""
    S, h = pool_NKSh.shape[2:]
    width = jnp.arange(spec.width)
    inside_C = slot_C - div(slot_C, S) * S
    at = pool_NKSh.at[page_C[:, None], span.kv_head, inside_C[:, None], width[None, :]]
    if owned_C is None and h == spec.width:
        return plgpu.load(at).astype(spec.compute)
    owned_C = jnp.full(slot_C.shape, True) if owned_C is None else owned_C
    zero = 0 if pool_NKSh.dtype == jnp.int8 else 0.0
    return plgpu.load(at, mask=in_width(owned_C, width, h), other=zero).astype(spec.compute)


def div(x: jax.Array, y: int) -> jax.Array:
    """Quotient of numbers that are not negative; ``//`` would take care of signs."""
    return jax.lax.div(x, jnp.int32(y))


def in_width(valid_r: jax.Array, width: jax.Array, h: int) -> jax.Array:
    return valid_r[:, None] & (width < h)[None, :]


def _dot(a: jax.Array, b: jax.Array, transpose: bool) -> jax.Array:
    """A product accumulated in float32; float32 operands are not rounded to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((1,), (1 if transpose else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def log_sum_exp(top: jax.Array, total: jax.Array) -> jax.Array:
    """Natural logarithm of a sum of exponentials, from the running maximum in base 2 and the sum; of 0 it is -inf."""
    empty = total == 0
    return jnp.where(empty, -jnp.inf, top * LN_2 + jnp.log(jnp.where(empty, 1.0, total)))
