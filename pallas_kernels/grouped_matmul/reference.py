"""Matrix product of row groups, each with its own weight (experts): the semantics."""

import jax
import jax.numpy as jnp


def grouped_matmul(x_TI: jax.Array, w_EOI: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    """Multiplies consecutive groups of rows with one weight each.

    Args:
        x_TI: rows sorted by expert.
        w_EOI: one ``[out, in]`` weight per expert.
        group_sizes_E: int32 rows per expert; their sum may be less than T, the rest of the output is 0.

    Returns:
        [T, O] in the dtype of x, accumulated in float32.
    """
    T = x_TI.shape[0]
    ends_E = jnp.cumsum(group_sizes_E)
    expert_T = jnp.searchsorted(ends_E, jnp.arange(T), side="right")
    w_TOI = w_EOI[jnp.clip(expert_T, 0, w_EOI.shape[0] - 1)].astype(jnp.float32)
    y_TO = jnp.einsum("ti,toi->to", x_TI.astype(jnp.float32), w_TOI, precision="highest")
    return jnp.where((jnp.arange(T) < ends_E[-1])[:, None], y_TO, 0.0).astype(x_TI.dtype)
