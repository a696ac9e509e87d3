"""In which dtype the device holds a KV cache of a given dtype.

XLA's CPU backend has no bfloat16 and no fp8 updates: a scatter or ``dynamic_update_slice`` into such an array, and a
gather from it, convert the whole array to another type and back (an 18 MB pool: 5 ms for one token). It updates
integers in place. So there a bfloat16 or float8_e4m3fn cache is held as the bits of its values, and ops take uint16
and uint8 pools to mean that. Everything else (copies, offloading) moves the same bytes.
"""

import jax
import jax.numpy as jnp

_BITS = {jnp.dtype(jnp.bfloat16): jnp.dtype(jnp.uint16), jnp.dtype(jnp.float8_e4m3fn): jnp.dtype(jnp.uint8)}
_VALUES = {bits: value for value, bits in _BITS.items()}


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """The dtype of the pool arrays for a cache of ``dtype`` on ``platform`` (``jax.default_backend()``)."""
    dtype = jnp.dtype(dtype)
    return _BITS.get(dtype, dtype) if platform == "cpu" else dtype


def value_dtype(stored: jnp.dtype) -> jnp.dtype:
    """The dtype of the values in a pool of dtype ``stored``."""
    stored = jnp.dtype(stored)
    return _VALUES.get(stored, stored)


def as_values(x: jax.Array) -> jax.Array:
    """The values of (a part of) a pool."""
    return jax.lax.bitcast_convert_type(x, value_dtype(x.dtype)) if x.dtype in _VALUES else x


def as_stored(x: jax.Array, stored: jnp.dtype) -> jax.Array:
    """Values of the right dtype in the form of a pool of dtype ``stored``."""
    return jax.lax.bitcast_convert_type(x, stored) if jnp.dtype(stored) in _VALUES else x
