"""The computing warpgroups of the Mosaic attention: products on the tensor cores around an online softmax."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.mosaic_problem import (
    ROWS,
    Buffers,
    Problem,
    Ref,
    columns,
    span_of,
)
from pallas_kernels.ragged_paged_attention.mosaic_tiles import UNIT_TOKENS, WARPGROUP_UNITS, Tile

LOG2_E = math.log2(math.e)


def row_positions(problem: Problem, tile: Tile, warpgroup: jax.Array) -> jax.Array:
    """Position in the context of each of a warpgroup's 64 rows; -1 for those that belong to other rows' tokens."""
    row_M = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    unit_M = row_M // UNIT_TOKENS + (tile.unit + warpgroup * WARPGROUP_UNITS)
    token_M = (unit_M // problem.G + tile.group) * UNIT_TOKENS + row_M % UNIT_TOKENS
    mine_M = (token_M >= tile.start) & (token_M < tile.end)
    return jnp.where(mine_M, token_M + tile.shift, -1)


def over_columns(x_M: jax.Array, width: int) -> jax.Array:
    return jax.lax.broadcast_in_dim(x_M, (x_M.shape[0], width), (0,))


def log2_scores(problem: Problem, s_MB: jax.Array) -> jax.Array:
    """Scores in units of log 2, so that the softmax is made of powers of two."""
    if problem.soft_cap is None:
        return s_MB * (problem.scale * LOG2_E)
    # tanh(x) = 1 - 2 / (e^2x + 1): the hardware's tanh has 11 bits.
    power_MB = jnp.exp2(s_MB * (2 * LOG2_E * problem.scale / problem.soft_cap))
    return (1.0 - 2.0 / (power_MB + 1.0)) * (problem.soft_cap * LOG2_E)


def attend(problem: Problem, tile: Tile, warpgroup: jax.Array, smem: Buffers) -> jax.Array:
    """The softmax-weighted sum of V for a warpgroup's 64 rows."""
    span = span_of(problem, tile)
    position_M = row_positions(problem, tile, warpgroup)
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    acc_Mh = plgpu.layout_cast(jnp.zeros((ROWS, problem.h), jnp.float32), plgpu.Layout.WGMMA)
    top_M = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), row_layout)
    total_M = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row_layout)

    def body(masked: bool, step: jax.Array, state: Any) -> Any:
        acc_Mh, top_M, total_M = state
        at = jax.lax.rem(step - span.low, jnp.int32(problem.stages))
        plgpu.barrier_wait(smem.k_ready_L.at[at])
        s_MB = scores(problem, warpgroup, at, smem)
        plgpu.barrier_arrive(smem.k_free_L.at[at])
        s_MB = log2_scores(problem, s_MB)
        if masked:
            s_MB = mask(problem, position_M - step * problem.slots, s_MB)
        new_M = jnp.maximum(top_M, s_MB.max(axis=1))
        base_M = jnp.where(new_M == -jnp.inf, 0.0, new_M) if masked else new_M
        keep_M = jnp.exp2(top_M - base_M)
        p_MB = jnp.exp2(s_MB - over_columns(base_M, problem.slots))
        total_M = total_M * keep_M + p_MB.sum(axis=1)
        smem.p_WMB[warpgroup] = p_MB.astype(smem.p_WMB.dtype)
        plgpu.commit_smem()
        plgpu.barrier_wait(smem.v_ready_L.at[at])
        acc_Mh = acc_Mh * over_columns(keep_M, problem.h) + values(problem, warpgroup, at, smem)
        plgpu.barrier_arrive(smem.v_free_L.at[at])
        return acc_Mh, new_M, total_M

    state = (acc_Mh, top_M, total_M)
    for low, high, masked in (
        (span.low, span.plain_low, True),
        (span.plain_low, span.plain_high, False),
        (span.plain_high, span.high, True),
    ):
        if problem.window is None and low is span.low:
            continue
        state = jax.lax.fori_loop(low, high, functools.partial(body, masked), state)
    acc_Mh, _, total_M = state
    inverse_M = 1.0 / jnp.where(total_M == 0.0, 1.0, total_M)
    return acc_Mh * over_columns(inverse_M, problem.h)


def scores(problem: Problem, warpgroup: jax.Array, at: jax.Array, smem: Buffers) -> jax.Array:
    def product(acc_MB: Ref) -> jax.Array:
        plgpu.wgmma(acc_MB, smem.q_WMh.at[warpgroup], smem.k_LBh.at[at].transpose((1, 0)))
        return acc_MB[...]

    return pl.run_scoped(product, plgpu.ACC((ROWS, problem.slots), jnp.float32))


def values(problem: Problem, warpgroup: jax.Array, at: jax.Array, smem: Buffers) -> jax.Array:
    def product(acc_Mh: Ref) -> jax.Array:
        plgpu.wgmma(acc_Mh, smem.p_WMB.at[warpgroup], smem.v_LBh.at[at])
        return acc_Mh[...]

    return pl.run_scoped(product, plgpu.ACC((ROWS, problem.h), jnp.float32))


def mask(problem: Problem, limit_M: jax.Array, s_MB: jax.Array) -> jax.Array:
    """Keeps the scores of slots up to ``limit``, counted from the step's first, as far as the window reaches.

    Done in parts of 8 columns that share the column numbers, which would take a fifth of the registers otherwise.
    """
    slot_M8 = columns((ROWS, 8))
    parts = []
    for start in range(0, problem.slots, 8):
        last_M = limit_M - start
        seen_M8 = slot_M8 <= over_columns(last_M, 8)
        if problem.window is not None:
            seen_M8 &= slot_M8 > over_columns(last_M - problem.window, 8)
        parts.append(jnp.where(seen_M8, s_MB[:, start : start + 8], -jnp.inf))
    return jnp.concatenate(parts, axis=1)
