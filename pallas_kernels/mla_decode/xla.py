"""Decode of multi-head latent attention in XLA: online softmax over gathered chunks, in loops as long as the contexts.

Tokens are sorted by the length of their contexts and advance in groups, so that a short one is not charged for a long
one of another group and the width of the table costs nothing. A token is computed by the same operations in the same
order whatever its neighbours are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kv_storage import value_dtype
from pallas_kernels.mla_decode.tokens import tokens_of
from pallas_kernels.ragged_paged_attention.xla_chunks import blocks_per_chunk, read_chunk

POOL_DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)
GROUP_TOKENS = 8
# Smaller than any score, and finite: a maximum that nothing has been compared to needs no special case.
LOWEST = float(jnp.finfo(jnp.float32).min)


class State(NamedTuple):
    """Online softmax: running maximum, sum of exponentials, weighted sum of latents. P is a token's sorted place."""

    top_PH: jax.Array
    sum_PH: jax.Array
    out_PHr: jax.Array


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


def mla_decode(
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
) -> jax.Array:
    """See ``reference.mla_decode``."""
    T = q_latent_THr.shape[0]
    M = block_table_RM.shape[1]
    S = latent_NKSr.shape[2]
    B = min(GROUP_TOKENS, T)
    J = blocks_per_chunk(S, M)
    row_T, length_T = tokens_of(T, query_start_Q, context_len_R)
    order_P, place_T = _sorted_places(length_T, B)
    row_P, length_P = row_T[order_P], jnp.where(jnp.arange(order_P.shape[0]) < T, length_T[order_P], 0)
    chunks_g = -(-length_P.reshape(-1, B).max(axis=1) // (J * S))
    latent_factor = scale * (1.0 if latent_scale_K is None else latent_scale_K[0])
    rope_factor = scale * (1.0 if rope_scale_K is None else rope_scale_K[0])
    q_latent_PHr = q_latent_THr[order_P].astype(jnp.float32) * latent_factor
    q_rope_PHd = q_rope_THd[order_P].astype(jnp.float32) * rope_factor

    def body(carry: tuple[jax.Array, jax.Array, State]) -> tuple[jax.Array, jax.Array, State]:
        group, chunk, state = carry

        def slice_of(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, group * B, B)

        entry_J = jnp.minimum(chunk * J + jnp.arange(J), M - 1)
        block_BJ = block_table_RM[slice_of(row_P)[:, None], entry_J[None, :]]
        owned_B = slice_of(length_P) - chunk * J * S
        latent_BCr, rope_BCd = (
            read_chunk(pool, block_BJ, owned_B, None)[:, 0] for pool in (latent_NKSr, rope_NKSd)
        )
        new = _add_chunk(
            State(*map(slice_of, state)),
            slice_of(q_latent_PHr),
            slice_of(q_rope_PHd),
            latent_BCr,
            rope_BCd,
            owned_B,
        )
        state = State(*(jax.lax.dynamic_update_slice_in_dim(x, y, group * B, 0) for x, y in zip(state, new)))
        last = chunk + 1 >= chunks_g[group]
        return jnp.where(last, group + 1, group), jnp.where(last, 0, chunk + 1), state

    P, (H, r) = order_P.shape[0], q_latent_THr.shape[1:]
    start = State(jnp.full((P, H), LOWEST), jnp.zeros((P, H)), jnp.zeros((P, H, r)))
    groups = jnp.sum(chunks_g > 0)
    _, _, end = jax.lax.while_loop(lambda carry: carry[0] < groups, body, (jnp.int32(0), jnp.int32(0), start))
    out_PHr = end.out_PHr / jnp.where(end.sum_PH == 0, 1.0, end.sum_PH)[:, :, None]
    if latent_scale_K is not None:
        out_PHr = out_PHr * latent_scale_K[0]
    return out_PHr[place_T].astype(q_latent_THr.dtype)


def _sorted_places(length_T: jax.Array, B: int) -> tuple[jax.Array, jax.Array]:
    """Tokens by decreasing length, padded to whole groups with copies of the first token, and the place of each."""
    T = length_T.shape[0]
    order_T = jnp.argsort(-length_T)
    place_T = jnp.zeros_like(order_T).at[order_T].set(jnp.arange(T))
    return jnp.pad(order_T, (0, -T % B)), place_T


def _add_chunk(
    state: State,
    q_latent_BHr: jax.Array,
    q_rope_BHd: jax.Array,
    latent_BCr: jax.Array,
    rope_BCd: jax.Array,
    owned_B: jax.Array,
) -> State:
    s_BHC = jnp.einsum("bhr,bcr->bhc", q_latent_BHr, latent_BCr) + jnp.einsum(
        "bhd,bcd->bhc", q_rope_BHd, rope_BCd
    )
    owned_BC = jnp.arange(latent_BCr.shape[1]) < owned_B[:, None]
    s_BHC = jnp.where(owned_BC[:, None], s_BHC, -jnp.inf)
    top_BH = jnp.maximum(state.top_PH, s_BHC.max(axis=-1))
    p_BHC = jnp.exp(s_BHC - top_BH[:, :, None])
    keep_BH = jnp.exp(state.top_PH - top_BH)
    out_BHr = state.out_PHr * keep_BH[:, :, None] + jnp.einsum("bhc,bcr->bhr", p_BHC, latent_BCr)
    return State(top_BH, state.sum_PH * keep_BH + p_BHC.sum(axis=-1), out_BHr)
