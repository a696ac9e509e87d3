"""Matrix product of row groups in XLA, formulated for GPUs: the fallback where the Triton kernel cannot serve.

The formulation for CPUs would find the expert of a tile by a loop inside of the loop over tiles, convert each weight
to float32 and wait for the host after each tile, whose number it only knows on the device. Here the tiles of the
Triton kernel are gone through in a loop of known length: five launches a tile, without the host, in the dtype of the
operands (compiled for an H200).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import tiles

_MOST_ROWS = 256


def supports(x_TI: jax.Array, w_EOI: jax.Array, group_sizes_E: jax.Array) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    return True, ""


def grouped_matmul(x_TI: jax.Array, w_EOI: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    """See ``reference.grouped_matmul``."""
    T = x_TI.shape[0]
    E, O, _ = w_EOI.shape
    t = tile_rows(T, E)
    work = tiles.make(group_sizes_E, T, t)
    # A tile may reach past its group: the end is padded, and the rows of other groups are put back.
    x_PI = jnp.pad(x_TI, ((0, t), (0, 0)))
    # Float32 is meant to be float32; the default on GPUs is TF32.
    precision = jax.lax.Precision.HIGHEST if x_TI.dtype == jnp.float32 else None

    def tile(i: jax.Array, y_PO: jax.Array) -> jax.Array:
        expert, first, stop = work.expert_P[i], work.first_P[i], work.stop_P[i]
        first = jnp.minimum(first, T)
        w_OI = jax.lax.dynamic_index_in_dim(w_EOI, jnp.minimum(expert, E - 1), keepdims=False)
        new_tO = jax.lax.dot_general(
            jax.lax.dynamic_slice_in_dim(x_PI, first, t),
            w_OI,
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        mine_t = (first + jnp.arange(t) < stop) & (expert < E)
        old_tO = jax.lax.dynamic_slice_in_dim(y_PO, first, t)
        y_tO = jnp.where(mine_t[:, None], new_tO.astype(y_PO.dtype), old_tO)
        return jax.lax.dynamic_update_slice_in_dim(y_PO, y_tO, first, 0)

    y_PO = jax.lax.fori_loop(0, len(work.first_P), tile, jnp.zeros((T + t, O), x_TI.dtype))
    return y_PO[:T]


def tile_rows(T: int, E: int) -> int:
    """Rows per tile: about twice the mean rows per expert, as a power of two, so that most experts need one tile."""
    return min(_MOST_ROWS, max(16, 2 << (-(-T // E) - 1).bit_length()))
