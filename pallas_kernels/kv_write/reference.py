"""Write of new K and V into the paged pool: the semantics, in plain jnp."""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_storage import as_stored, value_dtype


def kv_write(
    k_NKSh: jax.Array,
    v_NKSh: jax.Array,
    k_TKh: jax.Array,
    v_TKh: jax.Array,
    slot_T: jax.Array,
    *,
    k_scale_K: jax.Array,
    v_scale_K: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Scatters the K and V of T tokens into their slots.

    Args:
        k_NKSh, v_NKSh: the pool. A 1-byte dtype (float8_e4m3fn, float8_e5m2, int8) is a quantized cache:
            values are divided by the head's scale, saturated to the dtype's finite range, and rounded. uint16
            and uint8 hold the bits of bfloat16 and float8_e4m3fn (see ``kv_storage``).
        slot_T: int32 ``block * S + offset``. Padding writes to block 0, several times over; its content is
            undefined.
        k_scale_K, v_scale_K: float32, used by quantized caches only.

    Returns:
        The updated pools.
    """

    def write(pool_NKSh: jax.Array, x_TKh: jax.Array, scale_K: jax.Array) -> jax.Array:
        S = pool_NKSh.shape[2]
        return pool_NKSh.at[slot_T // S, :, slot_T % S].set(quantize(x_TKh, scale_K, pool_NKSh.dtype))

    return write(k_NKSh, k_TKh, k_scale_K), write(v_NKSh, v_TKh, v_scale_K)


def quantize(x_TKh: jax.Array, scale_K: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Converts to the cache dtype; 1-byte dtypes divide by the scale and saturate instead of overflowing."""
    return as_stored(_convert(x_TKh, scale_K, value_dtype(dtype)), dtype)


def _convert(x_TKh: jax.Array, scale_K: jax.Array, dtype: jnp.dtype) -> jax.Array:
    if jnp.dtype(dtype).itemsize > 1:
        return x_TKh.astype(dtype)
    x = x_TKh.astype(jnp.float32) / scale_K[None, :, None]
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return jnp.clip(jnp.round(x), info.min, info.max).astype(dtype)
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit).astype(dtype)
