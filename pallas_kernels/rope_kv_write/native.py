"""Head norms, rotary embedding and write of K and V by the native CPU library: one pass over the tokens, and pools that
are updated where they lie, whatever their dtype.

Block 0, whose content is undefined, is not written.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import library
from pallas_kernels.rope_kv_write import xla

ACTIVATION_DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16)


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
    ok, reason = library.available()
    if not ok:
        return False, reason
    if qkv_TAh.dtype not in ACTIVATION_DTYPES:
        names = ", ".join(jnp.dtype(d).name for d in ACTIVATION_DTYPES)
        return False, f"activations of dtype {qkv_TAh.dtype}; supported: {names}"
    if k_NKSh.dtype != v_NKSh.dtype:
        return False, f"K and V caches of different dtypes, {k_NKSh.dtype} and {v_NKSh.dtype}"
    return xla.supports(
        qkv_TAh, cos_Ti, sin_Ti, k_NKSh, v_NKSh, slot_T, k_scale_K=k_scale_K, v_scale_K=v_scale_K
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
    """See ``reference.rope_kv_write``.

    Raises:
        ValueError: this backend cannot serve the arguments.
    """
    ok, reason = supports(
        qkv_TAh, cos_Ti, sin_Ti, k_NKSh, v_NKSh, slot_T, k_scale_K=k_scale_K, v_scale_K=v_scale_K
    )
    if not ok:
        raise ValueError(f"rope_kv_write: native cannot serve this: {reason}")
    T, A, h = qkv_TAh.shape
    queries = jax.ShapeDtypeStruct((T, A - 2 * k_NKSh.shape[1], h), qkv_TAh.dtype)
    pools = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_NKSh, v_NKSh)]
    call = jax.ffi.ffi_call("jaxinfer_rope_kv_write", (queries, *pools), input_output_aliases={3: 1, 4: 2})
    q_THh, k_NKSh, v_NKSh = call(
        qkv_TAh,
        cos_Ti.astype(jnp.float32),
        sin_Ti.astype(jnp.float32),
        k_NKSh,
        v_NKSh,
        slot_T,
        *(_floats(x) for x in (k_scale_K, v_scale_K, q_norm_h, k_norm_h)),
        norm_eps=np.float32(norm_eps),
    )
    return q_THh, k_NKSh, v_NKSh


def _floats(x: jax.Array | None) -> jax.Array:
    """An absent argument is an array without elements."""
    return jnp.zeros(0, jnp.float32) if x is None else x.astype(jnp.float32)
