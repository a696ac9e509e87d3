"""The Triton attention of one tile: some tokens of one row, the query heads of one KV head, a share of the context."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged_paged_attention.triton_chunk import (
    LOG2_E,
    LOWEST,
    Inputs,
    Ref,
    Rows,
    Scoring,
    Span,
    Spec,
    State,
    add_chunk,
    div,
    in_width,
    log_sum_exp,
)
from pallas_kernels.ragged_paged_attention.tuning import Launch
from pallas_kernels.triton_call import triton_call

# A share of the context is at least this long, so that short contexts are not split for nothing.
LEAST_SHARE = 256


class Partial(NamedTuple):
    """Softmax states of the shares of the context, by place ``tile * tokens + i``; merged by ``triton_merge``.

    Attributes:
        out_PHXh: float32 weighted sum of values; undefined where the share is empty.
        top_PHX, sum_PHX: float32, base 2: running maximum, sum of exponentials (0: an empty share).
    """

    out_PHXh: Ref
    top_PHX: Ref
    sum_PHX: Ref


class Program(NamedTuple):
    """Where a program stands in the grid. (Interpret mode knows it at the top of a kernel only.)"""

    tile: jax.Array
    head_block: jax.Array
    split: jax.Array


def tokens_per_tile(launch: Launch, group: int) -> int:
    """How many tokens fit into the rows of a program."""
    return max(1, launch.rows // group)


def output_of(inputs: Inputs) -> jax.ShapeDtypeStruct:
    """What the tiles make. Of a share of the context: float32, with one more value per head, the log-sum-exp."""
    T, H, h = inputs.q_THh.shape
    if inputs.share_1 is None:
        return jax.ShapeDtypeStruct((T, H, h), inputs.q_THh.dtype)
    return jax.ShapeDtypeStruct((T, H, h + 1), jnp.float32)


def attend(
    inputs: Inputs,
    scoring: Scoring,
    launch: Launch,
    tokens: int,
    shares: int,
    out_THh: jax.Array | None,
    interpret: bool,
) -> jax.Array | Partial:
    """Computes the tiles, into (a copy in place of) ``out_THh`` or, with several splits, into partial states."""
    _, H, h = inputs.q_THh.shape
    K = inputs.k_NKSh.shape[1]
    heads = min(H // K, launch.rows)
    spec = Spec(
        scoring,
        launch,
        H // K,
        heads,
        tokens,
        pl.next_power_of_2(h),
        compute_dtype(inputs.q_THh, inputs.k_NKSh),
        shares,
    )
    I = inputs.tiles.token_I.shape[0]
    grid = (I, K * pl.cdiv(H // K, heads), launch.splits)
    call = partial(
        triton_call, grid=grid, num_warps=launch.num_warps, num_stages=launch.num_stages, interpret=interpret
    )
    name = f"ragged_paged_attention_{'decode' if tokens == 1 else 'tiles'}"
    if launch.splits > 1:
        shapes = (I * tokens, H, launch.splits)
        state = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*shapes, h), shapes, shapes)]
        return Partial(*call(partial(_split_kernel, spec=spec), out_shape=state, name=name)(inputs))
    shape = output_of(inputs)
    if out_THh is None:
        return call(partial(_kernel, spec=spec), out_shape=shape, name=name)(inputs)
    aliases = {len(jax.tree.leaves(inputs)): 0}
    kernel = partial(_kernel_in_place, spec=spec)
    return call(kernel, out_shape=shape, name=name, input_output_aliases=aliases)(inputs, out_THh)


def compute_dtype(q_THh: jax.Array, k_NKSh: jax.Array) -> jnp.dtype:
    """Operand type of the products. 1-byte values are exact in either 16-bit type, two 16-bit types mix in float32."""
    if q_THh.dtype == k_NKSh.dtype or (q_THh.dtype.itemsize == 2 and k_NKSh.dtype.itemsize == 1):
        return q_THh.dtype
    return jnp.dtype(jnp.float32)


def _kernel_in_place(ins: Inputs, before_THh: Ref, out_THh: Ref, *, spec: Spec) -> None:
    del before_THh
    _kernel(ins, out_THh, spec=spec)


def _kernel(ins: Inputs, out_THh: Ref, *, spec: Spec) -> None:
    program = Program(*(pl.program_id(axis) for axis in range(3)))

    @pl.when(ins.tiles.count_I[program.tile] > 0)
    def compute() -> None:
        rows, state, _ = _attend_tile(ins, program, spec)
        out_rh = state.out_rh / jnp.where(state.sum_r == 0, 1.0, state.sum_r)[:, None]
        width = jnp.arange(spec.width)
        plgpu.store(
            out_THh.at[rows.token_r[:, None], rows.head_r[:, None], width[None, :]],
            out_rh.astype(out_THh.dtype),
            mask=in_width(rows.valid_r, width, ins.q_THh.shape[-1]),
        )
        if ins.share_1 is not None:
            at = out_THh.at[rows.token_r, rows.head_r, ins.q_THh.shape[-1]]
            plgpu.store(at, log_sum_exp(state.top_r, state.sum_r), mask=rows.valid_r)


def _split_kernel(ins: Inputs, out_PHXh: Ref, top_PHX: Ref, sum_PHX: Ref, *, spec: Spec) -> None:
    program = Program(*(pl.program_id(axis) for axis in range(3)))
    tile, _, split = program

    @pl.when(ins.tiles.count_I[tile] > 0)
    def compute() -> None:
        rows, state, filled = _attend_tile(ins, program, spec)
        place_r = rows.token_r - ins.tiles.token_I[tile] + tile * spec.tokens
        width = jnp.arange(spec.width)
        plgpu.store(top_PHX.at[place_r, rows.head_r, split], state.top_r, mask=rows.valid_r)
        plgpu.store(sum_PHX.at[place_r, rows.head_r, split], state.sum_r, mask=rows.valid_r)
        plgpu.store(
            out_PHXh.at[place_r[:, None], rows.head_r[:, None], split, width[None, :]],
            state.out_rh,
            mask=in_width(rows.valid_r & filled, width, out_PHXh.shape[-1]),
        )


def _attend_tile(ins: Inputs, program: Program, spec: Spec) -> tuple[Rows, State, jax.Array]:
    """The queries, their softmax state, and whether there is something in it: the first share may hold a sink."""
    launch, (tile, _, split) = spec.launch, program
    head_blocks = pl.cdiv(spec.group, spec.heads)
    kv_head = div(program.head_block, head_blocks)
    head_block = program.head_block - kv_head * head_blocks
    rows = _rows(ins, tile, kv_head, head_block, spec)
    highest = jnp.iinfo(jnp.int32).max
    first = jnp.int32(0)
    if spec.scoring.window is not None:
        first = jnp.min(jnp.where(rows.valid_r, rows.first_r, highest))
    end = jnp.max(rows.limit_r)
    solid = jnp.min(jnp.where(rows.valid_r, rows.solid_r, highest))
    span = Span(ins.tiles.row_I[tile], kv_head, first, end, ins.tiles.prefix_I[tile])
    low, high = div(first, launch.slots), div(end + launch.slots - 1, launch.slots)
    if launch.splits > 1:
        share = div(high - low + launch.splits - 1, launch.splits)
        share = jnp.maximum(share, max(1, LEAST_SHARE // launch.slots))
        low = low + split * share
        high = jnp.minimum(high, low + share)
    width = jnp.arange(spec.width)
    q_rh = plgpu.load(
        ins.q_THh.at[rows.token_r[:, None], rows.head_r[:, None], width[None, :]],
        mask=in_width(rows.valid_r, width, ins.q_THh.shape[-1]),
        other=0,
    ).astype(spec.compute)
    factor = jnp.float32(spec.scoring.scale)
    if ins.k_scale_K is not None:
        factor = factor * ins.k_scale_K[kv_head]
    state = _start(ins, rows, split, spec)
    step = partial(add_chunk, ins=ins, q_rh=q_rh, rows=rows, span=span, factor=factor, spec=spec)
    middle = low
    if spec.tokens > 1 or ins.ancestors_TU is not None:
        middle = jnp.minimum(div(solid, launch.slots), high)
        state = jax.lax.fori_loop(low, middle, partial(step, solid=True), state)
        middle = jnp.maximum(middle, low)
    state = jax.lax.fori_loop(middle, high, partial(step, solid=False), state)
    out_rh = state.out_rh
    if ins.v_scale_K is not None:
        out_rh = out_rh * ins.v_scale_K[kv_head]
    return rows, State(state.top_r, state.sum_r, out_rh), (low < high) | (split == 0)


def _rows(ins: Inputs, tile: jax.Array, kv_head: jax.Array, head_block: jax.Array, spec: Spec) -> Rows:
    r = jnp.arange(spec.launch.rows)
    i_r = div(r, spec.heads)
    head_r = head_block * spec.heads + r - i_r * spec.heads
    valid_r = (i_r < ins.tiles.count_I[tile]) & (i_r < spec.tokens) & (head_r < spec.group)
    token_r = ins.tiles.token_I[tile] + i_r

    def read(ref_T: Ref) -> jax.Array:
        return plgpu.load(ref_T.at[token_r], mask=valid_r, other=0)

    return Rows(token_r, kv_head * spec.group + head_r, valid_r, *(read(ref_T) for ref_T in ins.tokens))


def _start(ins: Inputs, rows: Rows, split: jax.Array, spec: Spec) -> State:
    """The state before the first chunk; a sink is a logit with value 0, and joins the first share."""
    R = spec.launch.rows
    out_rh = jnp.zeros((R, spec.width), jnp.float32)
    if ins.sinks_H is None:
        return State(jnp.full(R, LOWEST), jnp.zeros(R), out_rh)
    first = (split == 0) & rows.valid_r
    sink_r = plgpu.load(ins.sinks_H.at[rows.head_r], mask=rows.valid_r, other=0).astype(jnp.float32) * LOG2_E
    return State(jnp.where(first, sink_r, LOWEST), jnp.where(first, 1.0, 0.0), out_rh)
