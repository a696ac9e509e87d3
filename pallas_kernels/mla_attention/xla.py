"""Multi-head latent attention in XLA: the loops of ``ragged_paged_attention`` over one KV head, whose keys are the
latents with the rotated keys behind them, and whose values are the latents.

A chunk of latents is read once and serves all heads, as keys and as values.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_storage import value_dtype
from pallas_kernels.ragged_paged_attention.shares import Share
from pallas_kernels.ragged_paged_attention.xla import POOL_DTYPES, attend
from pallas_kernels.ragged_paged_attention.xla_chunks import Context, Scoring, read_chunk


def supports(
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
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    for pool in (latent_NKSr, rope_NKSd):
        if value_dtype(pool.dtype) not in POOL_DTYPES:
            names = ", ".join(jnp.dtype(dtype).name for dtype in POOL_DTYPES)
            return False, f"cache dtype {pool.dtype}; supported: {names}"
    if latent_NKSr.shape[1] != 1 or latent_NKSr.shape[:3] != rope_NKSd.shape[:3]:
        return (
            False,
            f"pools of shapes {latent_NKSr.shape} and {rope_NKSd.shape}; needed: [N, 1, S, r] and [N, 1, S, d]",
        )
    return True, ""


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
    """See ``reference.mla_attention``."""
    rows = (block_table_RM, query_start_Q, context_len_R)
    pools, factors = (latent_NKSr, rope_NKSd), (latent_scale_K, rope_scale_K)
    out_THr = _attend_pools(q_latent_THr, q_rope_THd, pools, factors, rows, scale, ancestors_TU)
    if latent_scale_K is not None:
        out_THr = out_THr * latent_scale_K[0]
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
    """See ``reference.mla_attention_share``."""
    rows, r = (block_table_RM, query_start_Q, context_len_R), latent_NKSr.shape[-1]
    pools, factors = (latent_NKSr, rope_NKSd), (latent_scale_K, rope_scale_K)
    out_THe = _attend_pools(q_latent_THr, q_rope_THd, pools, factors, rows, scale, ancestors_TU, share)
    out_THr, lse_TH = out_THe[..., :r], out_THe[..., r]
    return out_THr if latent_scale_K is None else out_THr * latent_scale_K[0], lse_TH


def _attend_pools(
    q_latent_THr: jax.Array,
    q_rope_THd: jax.Array,
    pools: tuple[jax.Array, jax.Array],
    factors: tuple[jax.Array | None, jax.Array | None],
    rows: tuple[jax.Array, jax.Array, jax.Array],
    scale: float,
    ancestors_TU: jax.Array | None,
    share: Share | None = None,
) -> jax.Array:
    """``attend`` with keys and values of the two pools, whose scales are ``factors``; heads are a group of one KV head.

    Args:
        rows: block table, query starts and context lengths.
    """
    (latent_NKSr, rope_NKSd), (block_table_RM, query_start_Q, context_len_R) = pools, rows
    latent_factor, rope_factor = (scale * (1.0 if factor is None else factor[0]) for factor in factors)
    q_THh = jnp.concatenate(
        [q_latent_THr.astype(jnp.float32) * latent_factor, q_rope_THd.astype(jnp.float32) * rope_factor],
        axis=-1,
    )

    def read(
        block_BJ: jax.Array, owned_B: jax.Array, visible_B: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        latent_BKCr = read_chunk(latent_NKSr, block_BJ, owned_B, visible_B)
        rope_BKCd = read_chunk(rope_NKSd, block_BJ, owned_B, visible_B)
        return jnp.concatenate([latent_BKCr, rope_BKCd], axis=-1), latent_BKCr

    _, _, S, r = latent_NKSr.shape
    context = Context(read, S, r, block_table_RM, share)
    scoring = Scoring(scale, window=None, soft_cap=None)
    return attend(q_THh[:, None], context, query_start_Q, context_len_R, scoring, None, ancestors_TU)[:, 0]
