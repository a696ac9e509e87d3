"""Head norms, rotary embedding and write of K and V in XLA: the separate steps, which XLA fuses as far as it does."""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write import xla as kv_write
from pallas_kernels.rope_kv_write.reference import norm, rotate


def supports(
    qkv_TAh: jax.Array,
    cos_Ti: jax.Array,
    sin_Ti: jax.Array,
    k_NKSh: jax.Array,
    v_NKSh: jax.Array,
    slot_T: jax.Array,
    *,
    k_scale_K: jax.Array,
    v_scale_K: jax.Array,
    q_norm_h: jax.Array | None = None,
    k_norm_h: jax.Array | None = None,
    norm_eps: float = 1e-6,
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    return kv_write.supports(
        k_NKSh, v_NKSh, qkv_TAh, qkv_TAh, slot_T, k_scale_K=k_scale_K, v_scale_K=v_scale_K
    )


def rope_kv_write(
    qkv_TAh: jax.Array,
    cos_Ti: jax.Array,
    sin_Ti: jax.Array,
    k_NKSh: jax.Array,
    v_NKSh: jax.Array,
    slot_T: jax.Array,
    *,
    k_scale_K: jax.Array,
    v_scale_K: jax.Array,
    q_norm_h: jax.Array | None = None,
    k_norm_h: jax.Array | None = None,
    norm_eps: float = 1e-6,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``reference.rope_kv_write``."""
    K = k_NKSh.shape[1]
    H = qkv_TAh.shape[1] - 2 * K
    q_THh, k_TKh, v_TKh = jnp.split(qkv_TAh, (H, H + K), axis=1)
    q_THh = rotate(norm(q_THh, q_norm_h, norm_eps), cos_Ti, sin_Ti)
    k_TKh = rotate(norm(k_TKh, k_norm_h, norm_eps), cos_Ti, sin_Ti)
    pools = kv_write.kv_write(k_NKSh, v_NKSh, k_TKh, v_TKh, slot_T, k_scale_K=k_scale_K, v_scale_K=v_scale_K)
    return q_THh, *pools
