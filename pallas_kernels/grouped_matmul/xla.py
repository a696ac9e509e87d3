"""Matrix product of row groups in XLA: a loop over tiles of rows of one expert each."""

import jax
import jax.numpy as jnp

TILE = 16


def supports(x_TI: jax.Array, w_EOI: jax.Array, group_sizes_E: jax.Array) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    return True, ""


def grouped_matmul(x_TI: jax.Array, w_EOI: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    """See ``reference.grouped_matmul``."""
    T, I = x_TI.shape
    E, O, _ = w_EOI.shape
    t = min(TILE, max(T, 2))
    tiles_E = (group_sizes_E + t - 1) // t
    end_E, row_end_E = jnp.cumsum(tiles_E), jnp.cumsum(group_sizes_E)
    x_PI = jnp.concatenate([x_TI, jnp.zeros((t, I), x_TI.dtype)])

    def body(i: jax.Array, y_PO: jax.Array) -> jax.Array:
        e = jnp.clip(jnp.searchsorted(end_E, i, side="right"), 0, E - 1)
        first = (i - (end_E[e] - tiles_E[e])) * t
        start = row_end_E[e] - group_sizes_E[e] + first
        x_tI = jax.lax.dynamic_slice_in_dim(x_PI, start, t)
        w_OI = jax.lax.dynamic_index_in_dim(w_EOI, e, keepdims=False)
        y_tO = jax.lax.dot_general(x_tI, w_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        mine_t1 = (first + jnp.arange(t) < group_sizes_E[e])[:, None]
        old_tO = jax.lax.dynamic_slice_in_dim(y_PO, start, t)
        return jax.lax.dynamic_update_slice_in_dim(y_PO, jnp.where(mine_t1, y_tO, old_tO), start, 0)

    y_PO = jax.lax.fori_loop(0, end_E[-1], body, jnp.zeros((T + t, O), jnp.float32))
    return y_PO[:T].astype(x_TI.dtype)
