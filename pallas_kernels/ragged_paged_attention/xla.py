"""Ragged paged attention in XLA: online softmax over gathered chunks, in loops as long as the real contexts.

The batch is split in two on the device. Rows with one token (decodes) advance in groups of similar length; rows with
more (prefill chunks, drafts) are cut in tiles of queries. Trip counts come from the data, so that short rows are not
charged for long ones and the width of the table costs nothing. A row is computed by the same operations in the same
order whatever its neighbours are.

Method: online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) over chunks, as in FlashAttention (Dao et al.
2022, arXiv:2205.14135), over a paged cache (Kwon et al. 2023, arXiv:2309.06180).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_storage import value_dtype
from pallas_kernels.ragged_paged_attention.shares import Share
from pallas_kernels.ragged_paged_attention.xla_chunks import Context, Scoring, read_chunk
from pallas_kernels.ragged_paged_attention.xla_rows import attend_rows
from pallas_kernels.ragged_paged_attention.xla_tiles import attend_tiles

POOL_DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)


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
    if value_dtype(k_NKSh.dtype) not in POOL_DTYPES or value_dtype(v_NKSh.dtype) not in POOL_DTYPES:
        names = ", ".join(jnp.dtype(d).name for d in POOL_DTYPES)
        return False, f"KV cache dtypes {k_NKSh.dtype}, {v_NKSh.dtype}; supported: {names}"
    H, K = q_THh.shape[1], k_NKSh.shape[1]
    if H % K:
        return False, f"{H} query heads are not a multiple of {K} KV heads"
    return True, ""


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
    """See ``reference.ragged_paged_attention``."""
    T, H, h = q_THh.shape
    K = k_NKSh.shape[1]
    sink_KG = None if sinks_H is None else sinks_H.astype(jnp.float32).reshape(K, H // K)
    out_TKGh = _attend_pools(
        q_THh,
        (k_NKSh, v_NKSh),
        (block_table_RM, query_start_Q, context_len_R),
        Scoring(scale, window, soft_cap),
        sink_KG,
        k_scale_K,
        ancestors_TU,
    )
    if v_scale_K is not None:
        out_TKGh = out_TKGh * v_scale_K[:, None, None]
    return out_TKGh.reshape(T, H, h).astype(q_THh.dtype)


def ragged_paged_attention_share(
    q_THh: jax.Array,
    k_NKSh: jax.Array,
    v_NKSh: jax.Array,
    block_table_RM: jax.Array,
    query_start_Q: jax.Array,
    context_len_R: jax.Array,
    *,
    share: Share,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale_K: jax.Array | None = None,
    v_scale_K: jax.Array | None = None,
    ancestors_TU: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See ``reference.ragged_paged_attention_share``."""
    T, H, h = q_THh.shape
    out_TKGe = _attend_pools(
        q_THh,
        (k_NKSh, v_NKSh),
        (block_table_RM, query_start_Q, context_len_R),
        Scoring(scale, window, soft_cap),
        None,
        k_scale_K,
        ancestors_TU,
        share,
    )
    out_TKGh, lse_TKG = out_TKGe[..., :h], out_TKGe[..., h]
    if v_scale_K is not None:
        out_TKGh = out_TKGh * v_scale_K[:, None, None]
    return out_TKGh.reshape(T, H, h), lse_TKG.reshape(T, H)


def _attend_pools(
    q_THh: jax.Array,
    pools: tuple[jax.Array, jax.Array],
    rows: tuple[jax.Array, jax.Array, jax.Array],
    scoring: Scoring,
    sink_KG: jax.Array | None,
    k_scale_K: jax.Array | None,
    ancestors_TU: jax.Array | None,
    share: Share | None = None,
) -> jax.Array:
    """``attend`` with keys and values of pools.

    Args:
        rows: block table, query starts and context lengths.
    """
    (k_NKSh, v_NKSh), (block_table_RM, query_start_Q, context_len_R) = pools, rows
    T, H, h = q_THh.shape
    K, S = k_NKSh.shape[1:3]
    q_TKGh = q_THh.astype(jnp.float32).reshape(T, K, H // K, h) * scoring.scale
    if k_scale_K is not None:
        q_TKGh = q_TKGh * k_scale_K[:, None, None]

    def read(
        block_BJ: jax.Array, owned_B: jax.Array, visible_B: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        k_BKCh = read_chunk(k_NKSh, block_BJ, owned_B, visible_B)
        return k_BKCh, read_chunk(v_NKSh, block_BJ, owned_B, visible_B)

    context = Context(read, S, h, block_table_RM, share)
    return attend(q_TKGh, context, query_start_Q, context_len_R, scoring, sink_KG, ancestors_TU)


def attend(
    q_TKGh: jax.Array,
    context: Context,
    query_start_Q: jax.Array,
    context_len_R: jax.Array,
    scoring: Scoring,
    sink_KG: jax.Array | None,
    ancestors_TU: jax.Array | None,
) -> jax.Array:
    """Attention of ragged queries, float32 and scaled already, whatever keys and values are: float32 ``[T, K, G, value
    width]``, see ``Context`` for that of a share."""
    T, R = q_TKGh.shape[0], context_len_R.shape[0]
    length_R = query_start_Q[1:] - query_start_Q[:-1]
    q_RKGh = jnp.take(q_TKGh, query_start_Q[:-1], axis=0, mode="clip")
    single_R = jnp.where(length_R == 1, context_len_R, 0)
    out_RKGh = attend_rows(q_RKGh, context, single_R, scoring, sink_KG)
    row_T = jnp.clip(jnp.searchsorted(query_start_Q, jnp.arange(T), side="right") - 1, 0, R - 1)
    mine_T = (length_R[row_T] == 1) & (jnp.arange(T) < query_start_Q[R])
    out_TKGh = jnp.where(mine_T[:, None, None, None], out_RKGh[row_T], 0.0)
    if T > 1:
        out_TKGh = attend_tiles(
            out_TKGh, q_TKGh, context, query_start_Q, context_len_R, scoring, sink_KG, ancestors_TU
        )
    return out_TKGh
