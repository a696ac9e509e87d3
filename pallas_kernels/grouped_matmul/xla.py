"""Matrix product of row groups in XLA: a loop over tiles of rows, each of one expert.

The number of tiles is computed on the device, so the cost follows the rows and the experts that have some.
``lax.ragged_dot`` costs experts x rows on CPUs (16 experts of 1536 x 576, 64 rows: 142 ms against 17).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.linear.xla_cpu import product_cpu


def supports(x_TI: jax.Array, w_EOI: jax.Array, group_sizes_E: jax.Array) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    return True, ""


def grouped_matmul(x_TI: jax.Array, w_EOI: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    """See ``reference.grouped_matmul``."""
    T = x_TI.shape[0]
    E, O, _ = w_EOI.shape
    t = tile_rows(T, E)
    tiles_E = (group_sizes_E + t - 1) // t
    tile_end_E, row_end_E = jnp.cumsum(tiles_E), jnp.cumsum(group_sizes_E)
    # A tile may reach past its group: the end is padded, and the rows of later groups are put back.
    x_PI = jnp.pad(x_TI, ((0, t), (0, 0)))

    def tile(i: jax.Array, y_PO: jax.Array) -> jax.Array:
        e = jnp.clip(jnp.searchsorted(tile_end_E, i, side="right"), 0, E - 1)
        done = (i - (tile_end_E[e] - tiles_E[e])) * t
        at = row_end_E[e] - group_sizes_E[e] + done
        x_tI = jax.lax.dynamic_slice_in_dim(x_PI, at, t).astype(jnp.float32)
        new_tO = product_cpu(x_tI, _expert(w_EOI, e))
        old_tO = jax.lax.dynamic_slice_in_dim(y_PO, at, t)
        mine_t = done + jnp.arange(t) < group_sizes_E[e]
        return jax.lax.dynamic_update_slice_in_dim(y_PO, jnp.where(mine_t[:, None], new_tO, old_tO), at, 0)

    y_PO = jax.lax.fori_loop(0, tile_end_E[-1], tile, jnp.zeros((T + t, O), jnp.float32))
    return y_PO[:T].astype(x_TI.dtype)


def tile_rows(T: int, E: int) -> int:
    """Rows per tile: about the mean rows per expert, as a power of two."""
    return min(64, max(8, 1 << ((T - 1) // E).bit_length()))


def _expert(w_EOI: jax.Array, e: jax.Array) -> jax.Array:
    """One expert's weight in float32, without converting all of them: a bfloat16 slice would, on CPUs."""
    w_EOI, e = jax.lax.optimization_barrier((w_EOI, e))
    if w_EOI.dtype != jnp.bfloat16:
        return jax.lax.dynamic_index_in_dim(w_EOI, e, keepdims=False).astype(jnp.float32)
    bits_OI = jax.lax.dynamic_index_in_dim(jax.lax.bitcast_convert_type(w_EOI, jnp.uint16), e, keepdims=False)
    return jax.lax.bitcast_convert_type(bits_OI.astype(jnp.uint32) << 16, jnp.float32)
