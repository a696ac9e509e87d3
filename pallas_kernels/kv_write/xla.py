"""Write of new K and V into the paged pool in XLA, in place when the pool is donated."""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write.reference import quantize


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
    k_TKh = quantize(k_TKh, k_scale_K, k_NKSh.dtype)
    v_TKh = quantize(v_TKh, v_scale_K, v_NKSh.dtype)

    def body(i: jax.Array, pools: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # A scatter on a bfloat16 operand is computed in float32 on CPUs: the whole pool would be converted.
        at = (slot_T[i] // S, 0, slot_T[i] % S, 0)
        k_1K1h = jax.lax.dynamic_slice_in_dim(k_TKh, i, 1)[:, :, None]
        v_1K1h = jax.lax.dynamic_slice_in_dim(v_TKh, i, 1)[:, :, None]
        return jax.lax.dynamic_update_slice(pools[0], k_1K1h, at), jax.lax.dynamic_update_slice(
            pools[1], v_1K1h, at
        )

    return jax.lax.fori_loop(0, slot_T.shape[0], body, (k_NKSh, v_NKSh))
