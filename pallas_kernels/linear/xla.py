"""Matrix product with a weight stored ``[out, in]`` in XLA, for any platform."""

import jax
import jax.numpy as jnp


def supports(
    x_TI: jax.Array, w_OI: jax.Array, bias_O: jax.Array | None = None, *, out_dtype: jnp.dtype | None = None
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    return True, ""


def linear(
    x_TI: jax.Array, w_OI: jax.Array, bias_O: jax.Array | None = None, *, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """See ``reference.linear``."""
    return add_bias(product(x_TI, w_OI), bias_O, out_dtype or x_TI.dtype)


def product(x_TI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """``x @ w.T`` in float32. Float32 operands are multiplied as such: the default on GPUs is TF32."""
    contract_last = (((1,), (1,)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if x_TI.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x_TI, w_OI, contract_last, precision=precision, preferred_element_type=jnp.float32
    )


def add_bias(y_TO: jax.Array, bias_O: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Adds the bias in float32 and rounds once."""
    if bias_O is not None:
        y_TO = y_TO + bias_O.astype(jnp.float32)
    return y_TO.astype(dtype)


def rows(w_OI: jax.Array, ids_T: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of a weight, ``[T, I]`` in ``dtype``."""
    return w_OI[ids_T].astype(dtype)
