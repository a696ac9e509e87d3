"""Ragged paged attention: the semantics, in plain jnp and float32. Slow; used by tests."""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_storage import as_values
from pallas_kernels.ragged_paged_attention.shares import Share


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
    """Causal attention of ragged queries over K and V read through block tables.

    Args:
        q_THh: queries, packed; row r owns ``query_start[r]:query_start[r+1]``, the last tokens of its
            context.
        k_NKSh, v_NKSh: the pool: N blocks of S slots for K heads. H is a multiple of K. The K and V of this
            step's tokens are already written. uint16 and uint8 hold the bits of bfloat16 and float8_e4m3fn (see
            ``kv_storage``).
        block_table_RM: int32 block ids; entries past the context may hold anything.
        query_start_Q: int32 [R + 1].
        context_len_R: int32; 0 for a padded row.
        scale: factor of the scores.
        window: a query sees the last ``window`` positions, its own included; None for all.
        soft_cap: scores become ``cap * tanh(score / cap)``.
        sinks_H: per-head logit that joins the softmax denominator only.
        k_scale_K, v_scale_K: float32 per-head factors of a quantized cache (value = stored * scale).
        ancestors_TU: int32 tree masks of drafts: bit b of word u says that the token sees token 32 * u + b of its
            row's tokens of this step, itself included. A token whose words are all 0 is causal, as all are without the
            argument. A tree lists parents before children. The position of one of its tokens is the row's first one
            plus its depth (the number of other tokens it sees), and the window counts from there; ancestors are always
            seen, so the window must be longer than the tree is deep.

    Returns:
        [T, H, h] in the dtype of q. Rows past ``query_start[R]`` are 0. Nothing in a slot that a sequence
        does not own, NaN included, reaches its output.
    """
    factors = (k_scale_K, v_scale_K)
    out_THh, _ = _attend(
        q_THh,
        (k_NKSh, v_NKSh),
        (block_table_RM, query_start_Q, context_len_R),
        Share(0, 1),
        scale,
        window,
        soft_cap,
        sinks_H,
        factors,
        ancestors_TU,
    )
    return out_THh.astype(q_THh.dtype)


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
    """Attention to the slots that one of several devices holds; ``merge`` of ``shares`` makes of the results of all
    devices what ``ragged_paged_attention`` makes of the whole context.

    Args:
        k_NKSh, v_NKSh: this device's part of the pools; see ``shares`` for which slots those are.
        share: this device's. The other arguments are those of all devices.

    Returns:
        The attention output, float32 ``[T, H, h]``, and the logarithm of the softmax's sum of exponentials, float32
        ``[T, H]``: -inf for a query that sees nothing here. Rows past ``query_start[R]`` have finite outputs and the
        same number, or -inf, on all devices.
    """
    return _attend(
        q_THh,
        (k_NKSh, v_NKSh),
        (block_table_RM, query_start_Q, context_len_R),
        share,
        scale,
        window,
        soft_cap,
        None,
        (k_scale_K, v_scale_K),
        ancestors_TU,
    )


def _attend(
    q_THh: jax.Array,
    pools: tuple[jax.Array, jax.Array],
    rows: tuple[jax.Array, jax.Array, jax.Array],
    share: Share,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks_H: jax.Array | None,
    factors: tuple[jax.Array | None, jax.Array | None],
    ancestors_TU: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Float32 output and log-sum-exp.

    Args:
        rows: block table, query starts and context lengths.
        factors: scales of K and V.
    """
    block_table_RM, query_start_Q, context_len_R = rows
    T, H, h = q_THh.shape
    R, M = block_table_RM.shape
    N, K, S, _ = pools[0].shape
    token = jnp.arange(T)
    row_T = jnp.clip(jnp.searchsorted(query_start_Q, token, side="right") - 1, 0, R - 1)
    valid_T = token < query_start_Q[R]
    length_R = query_start_Q[1:] - query_start_Q[:-1]
    prefix_T = context_len_R[row_T] - length_R[row_T]
    position_T = prefix_T + token - query_start_Q[row_T]
    table_RM = jnp.clip(block_table_RM, 0, N - 1)
    c = share.positions(jnp.arange(M * S), S)

    def dense(pool_NKSh: jax.Array, scale_K: jax.Array | None) -> jax.Array:
        x_RKCh = as_values(pool_NKSh[table_RM]).swapaxes(1, 2).reshape(R, K, M * S, h).astype(jnp.float32)
        if scale_K is not None:
            x_RKCh = x_RKCh * scale_K[None, :, None, None]
        owned_RC = c < context_len_R[:, None]
        return jnp.where(owned_RC[:, None, :, None], x_RKCh, 0.0)

    k_RKCh, v_RKCh = map(dense, pools, factors)
    q_TKGh = q_THh.astype(jnp.float32).reshape(T, K, H // K, h)
    with jax.default_matmul_precision("highest"):
        s_TKGC = jnp.einsum("tkgh,tkch->tkgc", q_TKGh, k_RKCh[row_T]) * scale
        if soft_cap is not None:
            s_TKGC = soft_cap * jnp.tanh(s_TKGC / soft_cap)
        seen_TC = c <= position_T[:, None]
        if window is not None:
            seen_TC &= c > position_T[:, None] - window
        if ancestors_TU is not None:
            tree_T = (ancestors_TU != 0).any(-1)
            tree_TC = seen_in_tree(ancestors_TU, prefix_T, c, window)
            seen_TC = jnp.where(tree_T[:, None], tree_TC, seen_TC)
        seen_TC &= valid_T[:, None]
        s_TKGC = jnp.where(seen_TC[:, None, None], s_TKGC, -jnp.inf)
        top = jnp.max(s_TKGC, axis=-1, keepdims=True)
        if sinks_H is not None:
            sink = sinks_H.astype(jnp.float32).reshape(1, K, H // K, 1)
            top = jnp.maximum(top, sink)
        top = jnp.where(jnp.isfinite(top), top, 0.0)
        p_TKGC = jnp.exp(s_TKGC - top)
        denominator = p_TKGC.sum(-1, keepdims=True)
        if sinks_H is not None:
            denominator = denominator + jnp.exp(sink - top)
        p_TKGC = p_TKGC / jnp.where(denominator == 0, 1.0, denominator)
        v_TKCh = jnp.where(seen_TC[:, None, :, None], v_RKCh[row_T], 0.0)
        out_TKGh = jnp.einsum("tkgc,tkch->tkgh", p_TKGC, v_TKCh)
    return out_TKGh.reshape(T, H, h), (top + jnp.log(denominator)).reshape(T, H)


def seen_in_tree(ancestors_TU: jax.Array, prefix_T: jax.Array, c: jax.Array, window: int | None) -> jax.Array:
    """Which positions ``c`` of its row's context a token of a tree sees."""
    words = ancestors_TU.shape[1]
    node_TC = c - prefix_T[:, None]
    word_TC = jnp.take_along_axis(ancestors_TU, jnp.clip(node_TC // 32, 0, words - 1), axis=1)
    ancestor_TC = (word_TC >> (node_TC % 32)) & 1 == 1
    depth_T = jax.lax.population_count(ancestors_TU).sum(-1) - 1
    in_window_TC = True if window is None else c > (prefix_T + depth_T)[:, None] - window
    return jnp.where(node_TC < 0, in_window_TC, ancestor_TC & (node_TC < 32 * words))
