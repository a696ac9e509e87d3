"""Write of new K and V into the paged pool in XLA: one scatter per pool, in place when the pool is donated.

On CPUs that holds for float32, float16, int8 and the bits of bfloat16 and fp8 (``kv_storage``); typed bfloat16 and fp8
pools work, but are converted as a whole.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_storage import value_dtype
from pallas_kernels.kv_write.reference import quantize

POOL_DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)


def supports(
    k_NKSh: jax.Array,
    v_NKSh: jax.Array,
    k_TKh: jax.Array,
    v_TKh: jax.Array,
    slot_T: jax.Array,
    *,
    k_scale_K: jax.Array,
    v_scale_K: jax.Array,
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    for pool in (k_NKSh, v_NKSh):
        if value_dtype(pool.dtype) not in POOL_DTYPES:
            names = ", ".join(jnp.dtype(d).name for d in POOL_DTYPES)
            return False, f"KV cache dtype {pool.dtype}; supported: {names}"
    return True, ""


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
    """See ``reference.kv_write``."""
    S = k_NKSh.shape[2]
    block_T, offset_T = slot_T // S, slot_T % S

    def write(pool_NKSh: jax.Array, x_TKh: jax.Array, scale_K: jax.Array) -> jax.Array:
        return pool_NKSh.at[block_T, :, offset_T].set(quantize(x_TKh, scale_K, pool_NKSh.dtype))

    return write(k_NKSh, k_TKh, k_scale_K), write(v_NKSh, v_TKh, v_scale_K)
