"""Matrix product with a weight stored ``[out, in]`` in XLA, formulated for the CPU backend.

XLA's CPU matrix product copies (packs) its second operand into another layout on every call. For few rows that costs
more than the product, so there the weight is the first operand: 1.7 times the speed for 2 to 16 float32 rows, 1.3
times for 32, the same for 64, less for 128 (Zen 3, weights of 3072 x 576 and 49152 x 576).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.linear.xla import add_bias, product, rows, supports

__all__ = ["linear", "product_cpu", "rows", "supports"]

MAX_ROWS_WEIGHT_FIRST = 48


def linear(
    x_TI: jax.Array, w_OI: jax.Array, bias_O: jax.Array | None = None, *, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """See ``reference.linear``."""
    return add_bias(product_cpu(x_TI, w_OI), bias_O, out_dtype or x_TI.dtype)


def product_cpu(x_TI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """``x @ w.T`` in float32."""
    T = x_TI.shape[0]
    if w_OI.dtype.itemsize == 2:
        # One 16-bit row converts the whole weight to float32: six times slower than two rows.
        return product(jnp.pad(x_TI, ((0, 1), (0, 0))), w_OI)[:1] if T == 1 else product(x_TI, w_OI)
    x_TI = x_TI.astype(w_OI.dtype)
    if T > MAX_ROWS_WEIGHT_FIRST:
        return product(x_TI, w_OI)
    # The barrier keeps the compiler from turning the transposed product back into x @ w.T.
    return jax.lax.optimization_barrier(product(w_OI, x_TI)).T
