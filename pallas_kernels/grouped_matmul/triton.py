"""Matrix product of row groups in Pallas-Triton.

A static grid covers the most tiles that any group sizes can need; a list made on the device says which rows of which
expert each of them computes (as in MegaBlocks, Gale et al., 2022, without its padding). Tiles that are not needed
leave at once, and the weights of an expert without rows are never read. A group starts a tile of its own, so a tile
has one expert, and a row's sums run over the inner dimension in an order that no other row changes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpus import Generation
from pallas_kernels.grouped_matmul import tiles
from pallas_kernels.grouped_matmul.tuning import Choice, choose
from pallas_kernels.pool_limits import offsets_fit
from pallas_kernels.triton_call import triton_call

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def supports(
    x_TI: jax.Array, w_EOI: jax.Array, group_sizes_E: jax.Array, *, generation: Generation = "hopper"
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    if x_TI.dtype not in _DTYPES:
        return False, f"rows of {jnp.dtype(x_TI.dtype).name}; allowed: bfloat16, float16, float32"
    if w_EOI.dtype != x_TI.dtype:
        names = (jnp.dtype(w_EOI.dtype).name, jnp.dtype(x_TI.dtype).name)
        return False, "weights of {} for rows of {}; allowed: the same dtype".format(*names)
    if group_sizes_E.dtype != jnp.int32:
        return False, f"group sizes of {jnp.dtype(group_sizes_E.dtype).name}; allowed: int32"
    if 0 in x_TI.shape or 0 in w_EOI.shape:
        return False, f"nothing to multiply: rows {x_TI.shape}, weights {w_EOI.shape}"
    return offsets_fit(w_EOI.shape, w_EOI.dtype)


def grouped_matmul(
    x_TI: jax.Array,
    w_EOI: jax.Array,
    group_sizes_E: jax.Array,
    *,
    generation: Generation = "hopper",
    choice: Choice | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See ``reference.grouped_matmul``; both operands have the same dtype."""
    T, I = x_TI.shape
    E, O, _ = w_EOI.shape
    choice = choice or choose(generation, T, E, O, I, x_TI.dtype)
    work = tiles.make(group_sizes_E, T, choice.rows)
    column_tiles = pl.cdiv(O, choice.columns)
    band = min(choice.band, column_tiles)
    return triton_call(
        partial(_kernel, choice=choice, band=band),
        grid=(band, tiles.count(T, E, choice.rows), pl.cdiv(column_tiles, band)),
        out_shape=jax.ShapeDtypeStruct((T, O), x_TI.dtype),
        name="grouped_matmul",
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        interpret=interpret,
    )(x_TI, w_EOI, *work)


def _kernel(
    x_ref: Any,
    w_ref: Any,
    expert_ref: Any,
    first_ref: Any,
    stop_ref: Any,
    y_ref: Any,
    *,
    choice: Choice,
    band: int,
) -> None:
    """One tile of the output: the rows of one tile, ``choice.columns`` columns. Axis m is rows, n columns, d depth."""
    E, O, _ = w_ref.shape
    tile = pl.program_id(1)
    column = (pl.program_id(2) * band + pl.program_id(0)) * choice.columns
    expert, first, stop = expert_ref[tile], first_ref[tile], stop_ref[tile]
    row_m1 = (first + jnp.arange(choice.rows))[:, None]
    column_1n = (column + jnp.arange(choice.columns))[None, :]
    target = y_ref.at[row_m1, column_1n]
    mine_mn = (row_m1 < stop) & (column_1n < O)
    wanted = (first < stop) & (column < O)

    @pl.when(wanted & (expert < E))
    def product() -> None:
        y_mn = _product(x_ref, w_ref, expert, first, stop, column, choice)
        plgpu.store(target, y_mn.astype(y_ref.dtype), mask=mine_mn)

    @pl.when(wanted & (expert >= E))
    def zeros() -> None:
        plgpu.store(target, jnp.zeros(mine_mn.shape, y_ref.dtype), mask=mine_mn)


def _product(
    x_ref: Any,
    w_ref: Any,
    expert: jax.Array,
    first: jax.Array,
    stop: jax.Array,
    column: jax.Array,
    choice: Choice,
) -> jax.Array:
    """Rows from ``first`` times columns from ``column`` of one expert, in float32; 0 outside of the arrays."""
    _, O, I = w_ref.shape
    row_m1 = (first + jnp.arange(choice.rows))[:, None]
    column_n1 = (column + jnp.arange(choice.columns))[:, None]
    even = I % choice.depth == 0

    def step(i: jax.Array, y_mn: jax.Array) -> jax.Array:
        depth_1d = (i * choice.depth + jnp.arange(choice.depth))[None, :]
        # Comparisons that are always true would still cost instructions.
        x_mask = row_m1 < stop if even else (row_m1 < stop) & (depth_1d < I)
        w_mask = column_n1 < O if even else (column_n1 < O) & (depth_1d < I)
        x_md = plgpu.load(x_ref.at[row_m1, depth_1d], mask=x_mask, other=0)
        w_nd = plgpu.load(w_ref.at[expert, column_n1, depth_1d], mask=w_mask, other=0)
        return y_mn + plgpu.dot(x_md, w_nd, trans_b=True, allow_tf32=False)

    zeros_mn = jnp.zeros((choice.rows, choice.columns), jnp.float32)
    return jax.lax.fori_loop(0, pl.cdiv(I, choice.depth), step, zeros_mn)
