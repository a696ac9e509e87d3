"""The ops of a head's layers over whole sequences, differentiable, for training with the module that serves.

While a head is trained, its "KV pool" ``[T, K, J, h]`` holds J entries for each of the T = B * n places of a batch:
slot 0 is the entry computed from the target's features, slot j the one that the head's own step j puts there. Step j at
place i stands for entry i + j of its sequence. It sees the entries 0..i of step 0, and slots 1..j of its own place:
what it would see when it drafts behind position i (EAGLE-3's training-time test, arXiv:2503.01840).
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.kv_cache.layout import KVCache, LayerKV, LayerKVSpec
from pallas_kernels.linear.xla import linear, rows
from pallas_kernels.ops import Ops
from pallas_kernels.rope_kv_write.reference import norm, rotate


def dense_batch(token_ids_Bn: jax.Array, step: int) -> ForwardBatch:
    """A batch of B whole sequences; its table and its slots hold the number of the step."""
    B, n = token_ids_Bn.shape
    return ForwardBatch(
        token_ids_T=token_ids_Bn.reshape(-1),
        positions_T=jnp.tile(jnp.arange(n, dtype=jnp.int32), B) + step,
        query_start_Q=jnp.arange(B + 1, dtype=jnp.int32) * n,
        context_len_R=jnp.full((B,), n, jnp.int32),
        block_tables=(jnp.full((B, 1), step, jnp.int32),),
        slots=(jnp.full((B * n,), step, jnp.int32),),
    )


def empty_entries(specs: tuple[LayerKVSpec, ...], places: int, steps: int, dtype: jnp.dtype) -> KVCache:
    """Zeroed entries of all layers."""
    return tuple(_empty(spec, places, steps, dtype) for spec in specs)


def _empty(spec: LayerKVSpec, places: int, steps: int, dtype: jnp.dtype) -> LayerKV:
    k, v = (jnp.zeros((places, spec.num_kv_heads, steps, width), dtype) for width in spec.widths)
    ones_K = jnp.ones((spec.num_kv_heads,), jnp.float32)
    return LayerKV(k, v, ones_K, ones_K)


def _rope_and_store(
    qkv_TAh: jax.Array,
    cos_Ti: jax.Array,
    sin_Ti: jax.Array,
    k_TKJh: jax.Array,
    v_TKJh: jax.Array,
    step_T: jax.Array,
    *,
    q_norm_h: jax.Array | None = None,
    k_norm_h: jax.Array | None = None,
    norm_eps: float = 1e-6,
    **scales: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As ``rope_kv_write``, with slot ``step`` of every place as target."""
    K = k_TKJh.shape[1]
    H = qkv_TAh.shape[1] - 2 * K
    q_THh, k_TKh, v_TKh = jnp.split(qkv_TAh, (H, H + K), axis=1)
    q_THh = rotate(norm(q_THh, q_norm_h, norm_eps), cos_Ti, sin_Ti)
    k_TKh = rotate(norm(k_TKh, k_norm_h, norm_eps), cos_Ti, sin_Ti)

    def store(pool_TKJh: jax.Array, x_TKh: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(pool_TKJh, x_TKh[:, :, None], step_T[0], axis=2)

    return q_THh, store(k_TKJh, k_TKh), store(v_TKJh, v_TKh)


def _attend(
    q_THh: jax.Array,
    k_TKJh: jax.Array,
    v_TKJh: jax.Array,
    block_table_RM: jax.Array,
    query_start_Q: jax.Array,
    context_len_R: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    **scales: Any,
) -> jax.Array:
    """Causal attention to slot 0, and to the later slots of the own place."""
    assert window is None
    assert soft_cap is None
    T, H, h = q_THh.shape
    B, K, J = context_len_R.shape[0], k_TKJh.shape[1], k_TKJh.shape[2]
    n, G = T // B, H // k_TKJh.shape[1]
    step = block_table_RM[0, 0]
    q = q_THh.reshape(B, n, K, G, h)
    k, v = k_TKJh.reshape(B, n, K, J, h), v_TKJh.reshape(B, n, K, J, h)
    shared = jnp.einsum("bqkgh,bckh->bkgqc", q, k[:, :, :, 0]) * scale
    shared = jnp.where(jnp.tril(jnp.ones((n, n), bool)), shared, -jnp.inf)
    own = jnp.einsum("bqkgh,bqkjh->bkgqj", q, k[:, :, :, 1:]) * scale
    own = jnp.where(jnp.arange(1, J) <= step, own, -jnp.inf)
    p = jax.nn.softmax(jnp.concatenate([shared, own], axis=-1), axis=-1)
    out = jnp.einsum("bkgqc,bckh->bqkgh", p[..., :n], v[:, :, :, 0])
    out = out + jnp.einsum("bkgqj,bqkjh->bqkgh", p[..., n:], v[:, :, :, 1:])
    return out.reshape(T, H, h)


def _unused(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("draft heads have dense MLPs and attention over full keys and values")


DENSE_OPS = Ops(
    attention=_attend,
    rope_kv_write=_rope_and_store,
    mla_attention=_unused,
    kv_write=_unused,
    linear=linear,
    rows=rows,
    grouped_matmul=_unused,
    truncated_draw=None,
    platform="cpu",
)
"""For descriptions of heads that are trained: ``make_head(..., DENSE_OPS, ...)``."""
