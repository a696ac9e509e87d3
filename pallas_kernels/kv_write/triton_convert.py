"""Conversion of values to the dtype of a KV cache inside Pallas-Triton kernels: what ``reference.quantize`` does."""

import jax
import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.kv_storage import value_dtype
from pallas_kernels.pool_limits import offsets_fit

POOL_DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)
VALUE_DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16)


def convert(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``x`` as values of a pool of ``dtype``.

    Division is the one of Triton (2 units in the last place), so that on a GPU a quantized value can differ from the
    XLA backend's by one step where the quotient lies on the border between two.

    Args:
        x: values of the activations' dtype.
        scale: float32, of a shape that broadcasts against ``x``; unused for dtypes of more than 1 byte.
    """
    if jnp.dtype(dtype).itemsize > 1:
        return x.astype(dtype)
    quotient = x.astype(jnp.float32) / scale
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        # The bounds are integers: it makes no difference whether rounding or saturation comes first.
        return _round_half_even(_clip(quotient, float(info.min), float(info.max))).astype(dtype)
    limit = float(jnp.finfo(dtype).max)
    return _clip(quotient, -limit, limit).astype(dtype)


def _clip(x: jax.Array, low: float, high: float) -> jax.Array:
    """``jnp.clip`` that keeps NaN: Pallas-Triton lowers minima and maxima to those that drop it."""
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


def _round_half_even(x: jax.Array) -> jax.Array:
    """``jnp.round``, which Pallas-Triton does not lower."""
    below = jnp.floor(x)
    rest = x - below
    odd = below - 2.0 * jnp.floor(below * 0.5) == 1.0
    return jnp.where((rest > 0.5) | ((rest == 0.5) & odd), below + 1.0, below)


def check_pool(pool_NKSh: jax.Array, generation: Generation) -> tuple[bool, str]:
    """Whether kernels for ``generation`` can write into a pool, and why not."""
    dtype = jnp.dtype(pool_NKSh.dtype)
    if value_dtype(dtype) != dtype:
        return (
            False,
            f"the KV pool holds the bits of {value_dtype(dtype).name} as {dtype.name}; typed pools only",
        )
    if dtype not in POOL_DTYPES:
        names = ", ".join(jnp.dtype(d).name for d in POOL_DTYPES)
        return False, f"KV cache dtype {dtype.name}; supported: {names}"
    if dtype == jnp.float8_e4m3fn and generation == "ampere":
        return (
            False,
            "float8_e4m3fn needs compute capability 8.9; on Ampere use int8, float8_e5m2 or bfloat16",
        )
    return offsets_fit(pool_NKSh.shape, dtype)


def check_values(x: jax.Array) -> tuple[bool, str]:
    """Whether activations have a dtype that the kernels read, and why not."""
    if jnp.dtype(x.dtype) not in VALUE_DTYPES:
        names = ", ".join(jnp.dtype(d).name for d in VALUE_DTYPES)
        return False, f"activations of dtype {jnp.dtype(x.dtype).name}; supported: {names}"
    return True, ""
