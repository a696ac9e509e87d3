"""Products of quantized weights with activations of 8 bits: the semantics."""

import jax
import jax.numpy as jnp

from pallas_kernels.linear.formats import FORMATS
from pallas_kernels.linear.packed import PackedWeight, unpack
from pallas_kernels.linear.reference import linear as exact

LARGEST = 127
SMALLEST = 1e-35
"""Blocks without a larger magnitude are 0: the inverse of their scale could be infinite."""


def linear(
    x_TI: jax.Array,
    w_OI: PackedWeight,
    bias_O: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """``x @ w.T + bias`` in float32 with x as ``round_blocks`` gives it for the format of each part of w.

    If a part is not quantized, x stays as it is.
    """
    dtype = out_dtype or x_TI.dtype
    if any(FORMATS[name].dense for name in w_OI.formats):
        return exact(x_TI, unpack(w_OI), bias_O, out_dtype=dtype)
    parts = []
    for data, name, size in zip(w_OI.data, w_OI.formats, w_OI.sizes, strict=True):
        part = PackedWeight((data,), (name,), (size,), w_OI.inputs)
        parts.append(exact(round_blocks(x_TI, FORMATS[name].block), unpack(part)))
    y_TO = jnp.concatenate(parts, axis=1)
    return (y_TO if bias_O is None else y_TO + bias_O.astype(jnp.float32)).astype(dtype)


def round_blocks(x_TI: jax.Array, block: int) -> jax.Array:
    """x rounded to 8 bits, as float32 ``[T, I]``.

    ``block`` inputs of a row are q * scale with scale = max |x| / 127 and q = round(x / scale), as the Q8_1 activations
    of ggml. A block with a value that is not finite is NaN.
    """
    T, I = x_TI.shape
    x_TXb = x_TI.astype(jnp.float32).reshape(T, I // block, block)
    top_TX1 = jnp.max(jnp.abs(x_TXb), axis=-1, keepdims=True)
    inverse_TX1 = jnp.where(top_TX1 > SMALLEST, LARGEST / top_TX1, 0.0)
    rounded_TXb = jnp.round(x_TXb * inverse_TX1) * (top_TX1 / LARGEST)
    return jnp.where(jnp.isfinite(top_TX1), rounded_TXb, jnp.nan).reshape(x_TI.shape)
