"""Attention of rows with several tokens (prefill chunks, drafts): tiles of queries of one sequence."""

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.xla_chunks import (
    Scoring,
    Softmax,
    blocks_per_chunk,
    finish,
    read_chunk,
    start,
    step,
)


def tile_tokens(T: int, H: int) -> int:
    """Queries per tile. Small tiles keep the scores in the nearest cache and waste little on short rows, like drafts to
    verify, which short steps are likely to hold; with few heads a tile needs more queries to feed the products."""
    return min(T, 8 if T <= 256 else 16 if H >= 8 else 32)


def attend_tiles(
    out_TKGh: jax.Array,
    q_TKGh: jax.Array,
    k_NKSh: jax.Array,
    v_NKSh: jax.Array,
    block_table_RM: jax.Array,
    query_start_Q: jax.Array,
    context_len_R: jax.Array,
    scoring: Scoring,
    sink_KG: jax.Array | None,
) -> jax.Array:
    """Causal attention of the rows with more than one token.

    The number of tiles and the chunks of each tile are computed on the device; a tile stops at its last query.

    Args:
        out_TKGh: float32; the tokens of other rows keep their values.
        q_TKGh: float32, scaled.

    Returns:
        float32 ``[T, K, G, h]``.
    """
    T, K, G, _ = q_TKGh.shape
    R = context_len_R.shape[0]
    t = tile_tokens(T, K * G)
    length_R = query_start_Q[1:] - query_start_Q[:-1]
    tiles_R = jnp.where(length_R > 1, (length_R + t - 1) // t, 0)
    end_R = jnp.cumsum(tiles_R)
    # A tile may reach t - 1 tokens past its row: the end is padded, and foreign tokens are put back.
    q_PKGh = jnp.pad(q_TKGh, ((0, t), (0, 0), (0, 0), (0, 0)))

    def tile(i: jax.Array, out_PKGh: jax.Array) -> jax.Array:
        row = jnp.clip(jnp.searchsorted(end_R, i, side="right"), 0, R - 1)
        done = (i - (end_R[row] - tiles_R[row])) * t
        at = query_start_Q[row] + done
        position_t = context_len_R[row] - length_R[row] + done + jnp.arange(t)
        new_tKGh = _attend_tile(
            jax.lax.dynamic_slice_in_dim(q_PKGh, at, t),
            k_NKSh,
            v_NKSh,
            block_table_RM[row],
            position_t,
            jnp.minimum(context_len_R[row], position_t[-1] + 1),
            scoring,
            sink_KG,
        )
        old_tKGh = jax.lax.dynamic_slice_in_dim(out_PKGh, at, t)
        mine_t = done + jnp.arange(t) < length_R[row]
        new_tKGh = jnp.where(mine_t[:, None, None, None], new_tKGh, old_tKGh)
        return jax.lax.dynamic_update_slice_in_dim(out_PKGh, new_tKGh, at, 0)

    out_PKGh = jnp.pad(out_TKGh, ((0, t), (0, 0), (0, 0), (0, 0)))
    return jax.lax.fori_loop(0, end_R[-1], tile, out_PKGh)[:T]


def _attend_tile(
    q_tKGh: jax.Array,
    k_NKSh: jax.Array,
    v_NKSh: jax.Array,
    block_M: jax.Array,
    position_t: jax.Array,
    context: jax.Array,
    scoring: Scoring,
    sink_KG: jax.Array | None,
) -> jax.Array:
    """Attention of consecutive queries of one sequence that see slots below ``context``: ``[t, K, G, h]``."""
    t, K, G, h = q_tKGh.shape
    M = block_M.shape[0]
    S = k_NKSh.shape[2]
    J = blocks_per_chunk(S, M)
    C = J * S
    q_1KGth = q_tKGh.transpose(1, 2, 0, 3)[None]

    def body(chunk: jax.Array, state: Softmax) -> Softmax:
        block_1J = jnp.take(block_M, jnp.minimum(chunk * J + jnp.arange(J), M - 1))[None]
        owned_1 = (context - chunk * C)[None]
        visible_1 = None
        if scoring.window is not None:
            visible_1 = (position_t[0] - scoring.window + 1 - chunk * C)[None]
        k_1KCh = read_chunk(k_NKSh, block_1J, owned_1, visible_1)
        v_1KCh = read_chunk(v_NKSh, block_1J, owned_1, visible_1)
        slot_1C = (chunk * C + jnp.arange(C))[None]
        return step(state, q_1KGth, k_1KCh, v_1KCh, slot_1C, position_t[None], scoring)

    first = jnp.int32(0)
    if scoring.window is not None:
        first = jnp.maximum(position_t[0] - scoring.window + 1, 0) // C
    state = jax.lax.fori_loop(first, (context + C - 1) // C, body, start((1, K, G, t, h), sink_KG))
    return finish(state)[0].transpose(2, 0, 1, 3)
