"""The loading warpgroup of the Mosaic attention: pages of K and V, through the block table, into a ring."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.mosaic_problem import (
    ROWS,
    SWIZZLE_COLUMNS,
    Buffers,
    Problem,
    Ref,
    Span,
    columns,
)
from pallas_kernels.ragged_paged_attention.mosaic_tiles import Tile


def load(
    problem: Problem,
    tile: Tile,
    span: Span,
    kv_head: jax.Array,
    k_NKSh: Ref,
    v_NKSh: Ref,
    table_RM: Ref,
    smem: Buffers,
) -> None:
    """Fills the ring. Entries of the table outside of the span are not followed."""
    size = problem.copy_slots

    def block_of(page: jax.Array) -> jax.Array:
        """The block to read; the one after the last, which TMA fills with zeros, for a page outside of the span."""
        entry = table_RM[tile.row, jnp.clip(page, 0, problem.M - 1)]
        inside = (page >= span.first_page) & (page < span.end_page)
        return jnp.where(inside, jnp.clip(entry, 0, problem.N - 1), problem.N)

    def copy(step: jax.Array, pool: Ref, tile_Bh: Ref, ready: Ref) -> None:
        for i in range(problem.copies):
            # Entries are read for K and for V: to keep them takes more registers than the loader has.
            block = block_of((step * problem.slots + i * size) // problem.S)
            offset = step % (problem.S // size) * size if size < problem.S else 0
            source = pool.at[block, kv_head, pl.ds(offset, size)]
            plgpu.copy_gmem_to_smem(source, tile_Bh.at[pl.ds(i * size, size)], ready)

    def fill(step: jax.Array, _: None) -> None:
        at = jax.lax.rem(step - span.low, jnp.int32(problem.stages))
        refill = step - span.low >= problem.stages
        pl.when(refill)(functools.partial(plgpu.barrier_wait, smem.k_free_L.at[at]))
        copy(step, k_NKSh, smem.k_LBh.at[at], smem.k_ready_L.at[at])
        pl.when(refill)(functools.partial(plgpu.barrier_wait, smem.v_free_L.at[at]))
        dirty = (step == span.high - 1) & (span.tail < problem.slots)

        @pl.when(jnp.logical_not(dirty))
        def _clean() -> None:
            copy(step, v_NKSh, smem.v_LBh.at[at], smem.v_ready_L.at[at])

        @pl.when(dirty)
        def _dirty() -> None:
            copy(step, v_NKSh, smem.v_LBh.at[at], smem.v_tail)
            plgpu.barrier_wait(smem.v_tail)
            zero_tail(problem, span.tail, smem.v_LBh.at[at])
            for _ in range(problem.copies):
                plgpu.barrier_arrive(smem.v_ready_L.at[at])

    jax.lax.fori_loop(span.low, span.high, fill, None)

    # Nobody may leave a barrier with arrivals that were never observed.
    def drain(step: jax.Array, _: None) -> None:
        at = jax.lax.rem(step - span.low, jnp.int32(problem.stages))
        plgpu.barrier_wait(smem.k_free_L.at[at])
        plgpu.barrier_wait(smem.v_free_L.at[at])

    jax.lax.fori_loop(jnp.maximum(span.low, span.high - problem.stages), span.high, drain, None)


def zero_tail(problem: Problem, clean: jax.Array, v_Bh: Ref) -> None:
    """Zeroes the rows of V from ``clean`` on: a weight of 0 does not hide a NaN there."""

    def zero(i: jax.Array, _: None) -> None:
        for start in range(0, problem.h, SWIZZLE_COLUMNS):
            part = v_Bh.at[pl.ds(i * ROWS, ROWS), pl.ds(start, SWIZZLE_COLUMNS)]
            kept = columns((ROWS, SWIZZLE_COLUMNS), 0) < clean - i * ROWS
            part[...] = jnp.where(kept, part[...], jnp.zeros((), part.dtype))

    jax.lax.fori_loop(0, problem.slots // ROWS, zero, None)
    plgpu.commit_smem()
