"""Multi-head latent attention over a paged latent cache: the semantics, in plain jnp and float32."""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_storage import as_values
from pallas_kernels.ragged_paged_attention.reference import seen_in_tree
from pallas_kernels.ragged_paged_attention.shares import Share


def mla_attention(
    q_latent_THr: jax.Array,
    q_rope_THd: jax.Array,
    latent_NKSr: jax.Array,
    rope_NKSd: jax.Array,
    block_table_RM: jax.Array,
    query_start_Q: jax.Array,
    context_len_R: jax.Array,
    *,
    scale: float,
    latent_scale_K: jax.Array | None = None,
    rope_scale_K: jax.Array | None = None,
    ancestors_TU: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of all heads over one shared latent per token (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    The caller absorbs the up-projections: a query head is multiplied by its key up-projection before, the output by
    its value up-projection after. Then keys are the latent and the rotated key side by side, and values the latent.

    Two pools instead of one of r + d values: either width is a power of two in the known models, they have the layout
    of other caches with K = 1, and are written by ``kv_write`` with the latent as K and the rotated key as V.

    Args:
        q_latent_THr: queries in the latent space, packed; row r owns ``query_start[r]:query_start[r+1]``, the last
            tokens of its context.
        q_rope_THd: the rotated parts of the queries, in the same dtype.
        latent_NKSr, rope_NKSd: the pools, K = 1: N blocks of S slots. What this step's tokens add is already written.
            uint16 and uint8 hold the bits of bfloat16 and float8_e4m3fn (see ``kv_storage``).
        block_table_RM: int32 block ids; entries past the context may hold anything.
        query_start_Q: int32 [R + 1].
        context_len_R: int32; 0 for a padded row.
        scale: factor of the scores.
        latent_scale_K, rope_scale_K: float32 [1]: factors of quantized pools (value = stored * scale).
        ancestors_TU: int32 tree masks of drafts, as in ``ragged_paged_attention``.

    Returns:
        [T, H, r] in the dtype of the queries. Tokens past ``query_start[R]`` are 0. Nothing in a slot that a sequence
        does not own, NaN included, reaches its output.
    """
    rows, pools = (block_table_RM, query_start_Q, context_len_R), (latent_NKSr, rope_NKSd)
    factors = (latent_scale_K, rope_scale_K)
    out_THr, _ = _attend(q_latent_THr, q_rope_THd, pools, factors, rows, Share(0, 1), scale, ancestors_TU)
    return out_THr.astype(q_latent_THr.dtype)


def mla_attention_share(
    q_latent_THr: jax.Array,
    q_rope_THd: jax.Array,
    latent_NKSr: jax.Array,
    rope_NKSd: jax.Array,
    block_table_RM: jax.Array,
    query_start_Q: jax.Array,
    context_len_R: jax.Array,
    *,
    share: Share,
    scale: float,
    latent_scale_K: jax.Array | None = None,
    rope_scale_K: jax.Array | None = None,
    ancestors_TU: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """``mla_attention`` over the slots that one of several devices holds, as ``ragged_paged_attention_share``.

    Returns:
        Output, float32 ``[T, H, r]``, and log-sum-exp, float32 ``[T, H]``.
    """
    rows, pools = (block_table_RM, query_start_Q, context_len_R), (latent_NKSr, rope_NKSd)
    factors = (latent_scale_K, rope_scale_K)
    return _attend(q_latent_THr, q_rope_THd, pools, factors, rows, share, scale, ancestors_TU)


def _attend(
    q_latent_THr: jax.Array,
    q_rope_THd: jax.Array,
    pools: tuple[jax.Array, jax.Array],
    factors: tuple[jax.Array | None, jax.Array | None],
    rows: tuple[jax.Array, jax.Array, jax.Array],
    share: Share,
    scale: float,
    ancestors_TU: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Float32 output and log-sum-exp.

    Args:
        factors: scales of the pools.
        rows: block table, query starts and context lengths.
    """
    block_table_RM, query_start_Q, context_len_R = rows
    T = q_latent_THr.shape[0]
    R, M = block_table_RM.shape
    N, _, S, _ = pools[0].shape
    token = jnp.arange(T)
    row_T = jnp.clip(jnp.searchsorted(query_start_Q, token, side="right") - 1, 0, R - 1)
    position_T = context_len_R[row_T] - query_start_Q[row_T + 1] + token
    c = share.positions(jnp.arange(M * S), S)
    seen_TC = c <= position_T[:, None]
    if ancestors_TU is not None:
        prefix_T = position_T - (token - query_start_Q[row_T])
        tree_TC = seen_in_tree(ancestors_TU, prefix_T, c, None)
        seen_TC = jnp.where((ancestors_TU != 0).any(-1)[:, None], tree_TC, seen_TC)
    seen_TC &= (token < query_start_Q[R])[:, None]
    table_RM = jnp.clip(block_table_RM, 0, N - 1)

    def read(pool_NKSe: jax.Array, scale_K: jax.Array | None) -> jax.Array:
        x_RCe = as_values(pool_NKSe[table_RM]).reshape(R, M * S, -1).astype(jnp.float32)
        if scale_K is not None:
            x_RCe = x_RCe * scale_K[0]
        return jnp.where(seen_TC[:, :, None], x_RCe[row_T], 0.0)

    latent_TCr, rope_TCd = map(read, pools, factors)
    with jax.default_matmul_precision("highest"):
        s_THC = jnp.einsum("thr,tcr->thc", q_latent_THr.astype(jnp.float32), latent_TCr)
        s_THC = s_THC + jnp.einsum("thd,tcd->thc", q_rope_THd.astype(jnp.float32), rope_TCd)
        s_THC = jnp.where(seen_TC[:, None], s_THC * scale, -jnp.inf)
        top = jnp.max(s_THC, axis=-1, keepdims=True)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        p_THC = jnp.exp(s_THC - top)
        total = p_THC.sum(-1, keepdims=True)
        out_THr = jnp.einsum("thc,tcr->thr", p_THC / jnp.where(total == 0, 1.0, total), latent_TCr)
    return out_THr, (top + jnp.log(total))[..., 0]
