"""The thread block of the Mosaic attention: one warpgroup loads, two compute 64 rows of scores each.

The loader walks the block table and copies K and V pages by TMA into a ring of tiles of ``slots`` slots; the compute
warpgroups multiply with wgmma and keep an online softmax in registers. What no query may see never enters the
arithmetic: pages outside of the tile's range are read past the end of the pool, where TMA fills in zeros; the slots
behind the end of a context in its last page are zeroed in shared memory, in V, and masked by a select in the scores.
A query's result is therefore the same, bit by bit, wherever it lies in the batch and in its tile.

Method: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608) for the roles of the warpgroups, online softmax (Milakov
and Gimelshein 2018, arXiv:1805.02867), paged cache (Kwon et al. 2023, arXiv:2309.06180).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.mosaic_loader import load
from pallas_kernels.ragged_paged_attention.mosaic_problem import (
    COMPUTE_WARPGROUPS,
    LOADER,
    ROWS,
    SWIZZLE_COLUMNS,
    Buffers,
    Problem,
    Ref,
    scratch,
    span_of,
    unit_token,
)
from pallas_kernels.ragged_paged_attention.mosaic_softmax import attend
from pallas_kernels.ragged_paged_attention.mosaic_tiles import FIELDS, UNIT_TOKENS, WARPGROUP_UNITS, Tile

# Lane semantics: the layout inference of the default one (jax 0.11.2) fails on copies of single rows of the result.
COMPILER = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


def attend_tiles(
    problem: Problem,
    q_THh: jax.Array,
    k_NKSh: jax.Array,
    v_NKSh: jax.Array,
    table_RM: jax.Array,
    tile_IF: jax.Array,
    interpret: Any,
) -> jax.Array:
    """Runs the tiles. Tokens that no tile covers are not written.

    Args:
        q_THh: T is a multiple of 8.
        tile_IF: from ``mosaic_tiles.tile_list``.
        interpret: None, or ``plgpu.InterpretGPUParams``.
    """
    kernel = plgpu.kernel(
        functools.partial(thread_block, problem),
        out_type=jax.ShapeDtypeStruct(q_THh.shape, q_THh.dtype),
        scratch_types=scratch(problem, q_THh.dtype),
        grid=(tile_IF.shape[0], k_NKSh.shape[1]),
        grid_names=("tile", "kv_head"),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
        kernel_name="ragged_paged_attention_prefill",
        interpret=interpret,
    )
    return kernel(q_THh, k_NKSh, v_NKSh, table_RM, tile_IF)


def thread_block(
    problem: Problem,
    q_THh: Ref,
    k_NKSh: Ref,
    v_NKSh: Ref,
    table_RM: Ref,
    tile_IF: Ref,
    out_THh: Ref,
    **buffers: Ref,
) -> None:
    """Each warpgroup finds its role and its tile; an empty tile ends at once."""
    kv_head = jax.lax.axis_index("kv_head")
    warpgroup = jax.lax.axis_index("warpgroup")
    smem = Buffers(**buffers)

    def read_tile() -> Tile:
        """Done wherever it is needed: registers are scarcer than loads."""
        return Tile(*(tile_IF[jax.lax.axis_index("tile"), field] for field in range(FIELDS)))

    @pl.when(warpgroup == LOADER)
    def _load() -> None:
        plgpu.set_max_registers(problem.loader_registers, action="decrease")
        tile = read_tile()
        span = span_of(problem, tile)
        pl.when(tile.end > tile.start)(
            lambda: load(problem, tile, span, kv_head, k_NKSh, v_NKSh, table_RM, smem)
        )

    @pl.when(warpgroup != LOADER)
    def _compute() -> None:
        plgpu.set_max_registers(problem.compute_registers, action="increase")
        tile = read_tile()

        @pl.when(tile.end > tile.start)
        def _tile() -> None:
            load_queries(problem, tile, kv_head, warpgroup, q_THh, smem)
            out_Mh = attend(problem, tile, warpgroup, smem)
            store(problem, read_tile(), kv_head, warpgroup, out_Mh, out_THh, smem)


def load_queries(
    problem: Problem, tile: Tile, kv_head: jax.Array, warpgroup: jax.Array, q_THh: Ref, smem: Buffers
) -> None:
    # A loop, so that the addresses of the units do not stay in registers until the result is stored.
    def copy(i: jax.Array, _: None) -> None:
        unit = warpgroup * WARPGROUP_UNITS + i
        head = kv_head * problem.G + (tile.unit + unit) % problem.G
        source = q_THh.at[pl.ds(unit_token(problem, tile, unit), UNIT_TOKENS), head]
        target = smem.q_WMh.at[warpgroup, pl.ds(i * UNIT_TOKENS, UNIT_TOKENS)]
        plgpu.copy_gmem_to_smem(source, target, smem.q_ready_W.at[warpgroup])

    jax.lax.fori_loop(0, WARPGROUP_UNITS, copy, None)
    plgpu.barrier_wait(smem.q_ready_W.at[warpgroup])


def store(
    problem: Problem,
    tile: Tile,
    kv_head: jax.Array,
    warpgroup: jax.Array,
    out_Mh: jax.Array,
    out_THh: Ref,
    smem: Buffers,
) -> None:
    """Writes the tokens of the tile's row and no others: whole units through the swizzled buffer of the queries,
    units that the row shares with its neighbours token by token."""
    base = warpgroup * WARPGROUP_UNITS
    low = unit_token(problem, tile, base)
    high = unit_token(problem, tile, base + WARPGROUP_UNITS - 1) + UNIT_TOKENS
    whole = (low >= tile.start) & (high <= tile.end)

    def head_of(unit: jax.Array) -> jax.Array:
        return kv_head * problem.G + (tile.unit + unit) % problem.G

    @pl.when(whole)
    def _whole() -> None:
        smem.q_WMh[warpgroup] = out_Mh.astype(out_THh.dtype)
        plgpu.commit_smem()

        def copy(i: jax.Array, _: None) -> None:
            source = smem.q_WMh.at[warpgroup, pl.ds(i * UNIT_TOKENS, UNIT_TOKENS)]
            token = unit_token(problem, tile, base + i)
            plgpu.copy_smem_to_gmem(source, out_THh.at[pl.ds(token, UNIT_TOKENS), head_of(base + i)])

        jax.lax.fori_loop(0, WARPGROUP_UNITS, copy, None)
        plgpu.wait_smem_to_gmem(0)

    def store_columns(start: int) -> None:
        smem.out_WMn[warpgroup] = out_Mh[:, start : start + SWIZZLE_COLUMNS].astype(out_THh.dtype)
        plgpu.commit_smem()

        def copy(row: jax.Array, _: None) -> None:
            unit = base + row // UNIT_TOKENS
            token = unit_token(problem, tile, unit) + row % UNIT_TOKENS

            @pl.when((token >= tile.start) & (token < tile.end))
            def _row() -> None:
                target = out_THh.at[token, head_of(unit), pl.ds(start, SWIZZLE_COLUMNS)]
                plgpu.copy_smem_to_gmem(smem.out_WMn.at[warpgroup, row], target)

        jax.lax.fori_loop(0, ROWS, copy, None)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(jnp.logical_not(whole))
    def _shared() -> None:
        for start in range(0, problem.h, SWIZZLE_COLUMNS):
            store_columns(start)
