"""Matrix product with a weight stored ``[out, in]``: the semantics."""

import jax
import jax.numpy as jnp


def linear(
    x_TI: jax.Array, w_OI: jax.Array, bias_O: jax.Array | None = None, *, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """``x @ w.T + bias`` accumulated in float32, returned in ``out_dtype`` (default: the dtype of x)."""
    y_TO = jnp.einsum("ti,oi->to", x_TI.astype(jnp.float32), w_OI.astype(jnp.float32), precision="highest")
    if bias_O is not None:
        y_TO = y_TO + bias_O.astype(jnp.float32)
    return y_TO.astype(out_dtype or x_TI.dtype)
