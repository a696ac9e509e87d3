"""Attention of rows with several tokens (prefill chunks, drafts): tiles of queries of one sequence."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.xla_chunks import (
    Context,
    Scoring,
    Softmax,
    blocks_per_chunk,
    causal,
    finish,
    start,
    step,
)


@dataclass(frozen=True)
class Tree:
    """Tree masks of a tile's queries: see ``ancestors_TU`` of the reference.

    Attributes:
        ancestors_tU: int32 words.
        prefix: tokens of the row's context before the tree.
    """

    ancestors_tU: jax.Array
    prefix: jax.Array

    @property
    def mask_t(self) -> jax.Array:
        """Which queries have a tree mask."""
        return (self.ancestors_tU != 0).any(-1)

    def positions(self, position_t: jax.Array) -> jax.Array:
        """Positions of the queries, given those they would have in a chain."""
        depth_t = jax.lax.population_count(self.ancestors_tU).sum(-1) - 1
        return jnp.where(self.mask_t, self.prefix + depth_t, position_t)

    def seen(self, seen_tC: jax.Array, position_C: jax.Array) -> jax.Array:
        """Replaces, for queries with a tree mask, what they see of the tree's own slots."""
        words = self.ancestors_tU.shape[1]
        node_C = position_C - self.prefix
        word_tC = jnp.take(self.ancestors_tU, jnp.clip(node_C // 32, 0, words - 1), axis=1)
        ancestor_tC = ((word_tC >> (node_C % 32)) & 1 == 1) & (node_C < 32 * words)
        return jnp.where(self.mask_t[:, None] & (node_C >= 0), ancestor_tC, seen_tC)


def tile_tokens(T: int, H: int) -> int:
    """Queries per tile. Small tiles keep the scores in the nearest cache and waste little on short rows, like drafts to
    verify, which short steps are likely to hold; with few heads a tile needs more queries to feed the products."""
    return min(T, 8 if T <= 256 else 16 if H >= 8 else 32)


def attend_tiles(
    out_TKGh: jax.Array,
    q_TKGh: jax.Array,
    context: Context,
    query_start_Q: jax.Array,
    context_len_R: jax.Array,
    scoring: Scoring,
    sink_KG: jax.Array | None,
    ancestors_TU: jax.Array | None,
) -> jax.Array:
    """Causal attention of the rows with more than one token.

    The number of tiles and the chunks of each tile are computed on the device; a tile stops at its last query.

    Args:
        out_TKGh: float32; the tokens of other rows keep their values.
        q_TKGh: float32, scaled.

    Returns:
        float32 ``[T, K, G, value width]``, see ``Context`` for that of a share.
    """
    T, K, G, _ = q_TKGh.shape
    R = context_len_R.shape[0]
    t = tile_tokens(T, K * G)
    length_R = query_start_Q[1:] - query_start_Q[:-1]
    tiles_R = jnp.where(length_R > 1, (length_R + t - 1) // t, 0)
    end_R = jnp.cumsum(tiles_R)
    # A tile may reach t - 1 tokens past its row: the end is padded, and foreign tokens are put back.
    q_PKGh = jnp.pad(q_TKGh, ((0, t), (0, 0), (0, 0), (0, 0)))
    ancestors_PU = None if ancestors_TU is None else jnp.pad(ancestors_TU, ((0, t), (0, 0)))

    def tile(i: jax.Array, out_PKGh: jax.Array) -> jax.Array:
        row = jnp.clip(jnp.searchsorted(end_R, i, side="right"), 0, R - 1)
        done = (i - (end_R[row] - tiles_R[row])) * t
        at = query_start_Q[row] + done
        prefix = context_len_R[row] - length_R[row]
        position_t = prefix + done + jnp.arange(t)
        tree = None
        if ancestors_PU is not None:
            tree = Tree(jax.lax.dynamic_slice_in_dim(ancestors_PU, at, t), prefix)
        new_tKGh = _attend_tile(
            jax.lax.dynamic_slice_in_dim(q_PKGh, at, t),
            context,
            row,
            position_t,
            jnp.minimum(context_len_R[row], position_t[-1] + 1),
            scoring,
            sink_KG,
            tree,
        )
        old_tKGh = jax.lax.dynamic_slice_in_dim(out_PKGh, at, t)
        mine_t = done + jnp.arange(t) < length_R[row]
        new_tKGh = jnp.where(mine_t[:, None, None, None], new_tKGh, old_tKGh)
        return jax.lax.dynamic_update_slice_in_dim(out_PKGh, new_tKGh, at, 0)

    out_PKGh = jnp.pad(out_TKGh, ((0, t), (0, 0), (0, 0), (0, 0)))
    return jax.lax.fori_loop(0, end_R[-1], tile, out_PKGh)[:T]


def _attend_tile(
    q_tKGh: jax.Array,
    context: Context,
    row: jax.Array,
    position_t: jax.Array,
    end: jax.Array,
    scoring: Scoring,
    sink_KG: jax.Array | None,
    tree: Tree | None,
) -> jax.Array:
    """Attention of consecutive queries of one sequence that see positions below ``end``: ``[t, K, G, value width]``."""
    t, K, G, _ = q_tKGh.shape
    block_M = context.block_table_RM[row]
    M = block_M.shape[0]
    S = context.slots
    J = blocks_per_chunk(S, M)
    C = J * S
    q_1KGth = q_tKGh.transpose(1, 2, 0, 3)[None]
    lowest = position_t[0] if tree is None else jnp.minimum(position_t[0], tree.positions(position_t).min())
    end_slot = context.slots_before(end)
    visible = jnp.int32(0)
    if scoring.window is not None:
        visible = context.slots_before(lowest - scoring.window + 1)

    def body(chunk: jax.Array, state: Softmax) -> Softmax:
        block_1J = jnp.take(block_M, jnp.minimum(chunk * J + jnp.arange(J), M - 1))[None]
        owned_1 = (end_slot - chunk * C)[None]
        visible_1 = None if scoring.window is None else (visible - chunk * C)[None]
        k_1KCh, v_1KCh = context.read(block_1J, owned_1, visible_1)
        position_C = context.positions(chunk * C + jnp.arange(C))
        if tree is None:
            seen_tC = causal(position_C[None], position_t[None], scoring.window)[0]
        else:
            seen_tC = causal(position_C[None], tree.positions(position_t)[None], scoring.window)[0]
            seen_tC = tree.seen(seen_tC, position_C)
        return step(state, q_1KGth, k_1KCh, v_1KCh, seen_tC[None], scoring)

    state = jax.lax.fori_loop(
        jnp.maximum(visible, 0) // C,
        (end_slot + C - 1) // C,
        body,
        start((1, K, G, t, context.value_width), sink_KG),
    )
    return finish(state, context.share is not None)[0].transpose(2, 0, 1, 3)
