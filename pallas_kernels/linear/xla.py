"""Matrix product with a weight stored ``[out, in]`` in XLA."""

import jax
import jax.numpy as jnp


def supports(x_TI: jax.Array, w_OI: jax.Array, bias_O: jax.Array | None = None) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    return True, ""


def linear(
    x_TI: jax.Array, w_OI: jax.Array, bias_O: jax.Array | None = None, *, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """See ``reference.linear``."""
    T = x_TI.shape[0]
    if T == 1 and w_OI.dtype == jnp.bfloat16:
        # One-row bfloat16 products are an order of magnitude slower than two-row ones on CPUs.
        x_TI = jnp.concatenate([x_TI, jnp.zeros_like(x_TI)])
    y_TO = jax.lax.dot_general(x_TI, w_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)[:T]
    if bias_O is not None:
        y_TO = y_TO + bias_O.astype(jnp.float32)
    return y_TO.astype(out_dtype or x_TI.dtype)
