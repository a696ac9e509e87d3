"""Ragged paged attention by the native CPU library: online softmax straight from the block tables, no gather.

The work is cut into pieces of (row, KV head, tile of queries), and rows of few tokens also by 256 keys, which XLA's
threads share. The pieces of a row depend on that row only, so its result is the same bits with any neighbours and any
number of threads. Sums are float32.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import library
from pallas_kernels.ragged_paged_attention import xla

ACTIVATION_DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16)


def supports(
    q_THh: jax.Array,
    k_NKSh: jax.Array,
    v_NKSh: jax.Array,
    block_table_RM: jax.Array,
    query_start_Q: jax.Array,
    context_len_R: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: jax.Array | None = None,
    k_scale_K: jax.Array | None = None,
    v_scale_K: jax.Array | None = None,
    ancestors_TU: jax.Array | None = None,
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    ok, reason = library.available()
    if not ok:
        return False, reason
    if q_THh.dtype not in ACTIVATION_DTYPES:
        names = ", ".join(jnp.dtype(d).name for d in ACTIVATION_DTYPES)
        return False, f"queries of dtype {q_THh.dtype}; supported: {names}"
    if k_NKSh.dtype != v_NKSh.dtype:
        return False, f"K and V caches of different dtypes, {k_NKSh.dtype} and {v_NKSh.dtype}"
    return xla.supports(
        q_THh, k_NKSh, v_NKSh, block_table_RM, query_start_Q, context_len_R, scale=scale, window=window
    )


def ragged_paged_attention(
    q_THh: jax.Array,
    k_NKSh: jax.Array,
    v_NKSh: jax.Array,
    block_table_RM: jax.Array,
    query_start_Q: jax.Array,
    context_len_R: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: jax.Array | None = None,
    k_scale_K: jax.Array | None = None,
    v_scale_K: jax.Array | None = None,
    ancestors_TU: jax.Array | None = None,
) -> jax.Array:
    """See ``reference.ragged_paged_attention``.

    Raises:
        ValueError: this backend cannot serve the arguments.
    """
    ok, reason = supports(
        q_THh, k_NKSh, v_NKSh, block_table_RM, query_start_Q, context_len_R, scale=scale, window=window
    )
    if not ok:
        raise ValueError(f"attention: native cannot serve this: {reason}")
    call = jax.ffi.ffi_call("jaxinfer_attention", jax.ShapeDtypeStruct(q_THh.shape, q_THh.dtype))
    return call(
        q_THh,
        k_NKSh,
        v_NKSh,
        block_table_RM,
        query_start_Q,
        context_len_R,
        _floats(sinks_H),
        _floats(k_scale_K),
        _floats(v_scale_K),
        jnp.zeros((0, 0), jnp.int32) if ancestors_TU is None else ancestors_TU,
        scale=np.float32(scale),
        soft_cap=np.float32(0.0 if soft_cap is None else soft_cap),
        window=np.int64(0 if window is None else window),
    )


def _floats(x: jax.Array | None) -> jax.Array:
    """An absent argument is an array without elements."""
    return jnp.zeros(0, jnp.float32) if x is None else x.astype(jnp.float32)
