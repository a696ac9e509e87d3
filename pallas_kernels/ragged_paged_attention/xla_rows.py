"""Attention of rows with one token (decodes): rows of similar length advance together, chunk by chunk."""

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

GROUP_ROWS = 8


def attend_rows(
    q_RKGh: jax.Array,
    context: Context,
    context_len_R: jax.Array,
    scoring: Scoring,
    sink_KG: jax.Array | None,
) -> jax.Array:
    """Attention of one query per row, the last token of its context.

    Rows are sorted by the chunks they need and processed in groups. One loop walks over all chunks of all groups, so
    its cost follows the sum of the contexts; a row that needs less than its group adds exact zeros.

    Args:
        q_RKGh: float32, scaled.
        context_len_R: 0 for rows to leave out.

    Returns:
        float32 ``[R, K, G, value width]``, see ``Context`` for that of a share; 0 for rows left out.
    """
    R, K, G, _ = q_RKGh.shape
    M = context.block_table_RM.shape[1]
    S = context.slots
    B = min(GROUP_ROWS, R)
    J = blocks_per_chunk(S, M)
    C = J * S
    end_R = context.slots_before(context_len_R)
    visible_R = jnp.zeros_like(end_R)
    if scoring.window is not None:
        visible_R = context.slots_before(context_len_R - scoring.window)
    order_P, place_R, chunks_g, first_P = _plan(end_R, jnp.maximum(visible_R, 0) // C, B, C)
    context_P, end_P, visible_P = (_at_places(x_R, order_P) for x_R in (context_len_R, end_R, visible_R))
    q_PKGh = jnp.take(q_RKGh, order_P, axis=0, mode="clip")
    table = context.block_table_RM.reshape(-1)

    def body(carry: tuple[jax.Array, jax.Array, Softmax]) -> tuple[jax.Array, jax.Array, Softmax]:
        group, i, state = carry
        at = group * B
        context_B = jax.lax.dynamic_slice_in_dim(context_P, at, B)
        row_B = jax.lax.dynamic_slice_in_dim(order_P, at, B)
        chunk_B = jax.lax.dynamic_slice_in_dim(first_P, at, B) + i
        entry_BJ = row_B[:, None] * M + jnp.minimum(chunk_B[:, None] * J + jnp.arange(J), M - 1)
        block_BJ = jnp.take(table, entry_BJ, mode="clip")
        owned_B = jax.lax.dynamic_slice_in_dim(end_P, at, B) - chunk_B * C
        visible_B = None
        if scoring.window is not None:
            visible_B = jax.lax.dynamic_slice_in_dim(visible_P, at, B) - chunk_B * C
        position_BC = context.positions(chunk_B[:, None] * C + jnp.arange(C))
        old = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at, B), state)
        new = step(
            old,
            jax.lax.dynamic_slice_in_dim(q_PKGh, at, B)[:, :, :, None],
            *context.read(block_BJ, owned_B, visible_B),
            causal(position_BC, context_B[:, None] - 1, scoring.window),
            scoring,
        )
        state = jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, at, 0), state, new)
        last = i + 1 >= chunks_g[group]
        return jnp.where(last, group + 1, group), jnp.where(last, 0, i + 1), state

    groups = jnp.sum(chunks_g > 0)
    init = (jnp.int32(0), jnp.int32(0), start((order_P.shape[0], K, G, 1, context.value_width), sink_KG))
    _, _, state = jax.lax.while_loop(lambda carry: carry[0] < groups, body, init)
    return finish(state, context.share is not None)[place_R, :, :, 0]


def _plan(end_R: jax.Array, first_R: jax.Array, B: int, C: int) -> tuple[jax.Array, ...]:
    """Sorts the rows by the chunks they need: from ``first_R`` to the one in which slot ``end_R`` - 1 lies.

    Returns:
        order_P: row at each place (padded to whole groups), place_R: place of each row, chunks_g: trips of each group,
        first_P: first chunk of each place.
    """
    R = end_R.shape[0]
    need_R = (end_R + C - 1) // C - first_R
    order_R = jnp.argsort(-need_R)
    place_R = jnp.zeros_like(order_R).at[order_R].set(jnp.arange(R))
    pad = -R % B
    order_P = jnp.pad(order_R, (0, pad))
    chunks_g = _at_places(need_R, order_P).reshape(-1, B).max(axis=1)
    return order_P, place_R, chunks_g, first_R[order_P]


def _at_places(x_R: jax.Array, order_P: jax.Array) -> jax.Array:
    """What belongs to the row at each place; 0 at those that pad the last group."""
    return jnp.where(jnp.arange(order_P.shape[0]) < x_R.shape[0], x_R[order_P], 0)
