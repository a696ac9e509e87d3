"""Which queries a program of the Triton attention computes: the ragged batch cut into tiles, on the device.

The arrays depend on the batch alone and not on the layer, so that a compiled step computes them once.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tokens(NamedTuple):
    """What each token sees of its row's context, in slots, of which only those of this device count; int32 ``[T]``.

    Attributes:
        first_T: the window begins here; no slot before this one is seen, except those of a tree.
        solid_T: all slots before this one are seen, as far as the window reaches: up to its own one for a causal
            token, those of earlier steps for a token of a tree.
        limit_T: no slot from this one on is seen. 0 for tokens that no row owns.
    """

    first_T: jax.Array
    solid_T: jax.Array
    limit_T: jax.Array


class Tiles(NamedTuple):
    """Consecutive tokens of one row for each program; int32 ``[I]``.

    Attributes:
        token_I: the first token.
        count_I: how many; a tile of 0 has nothing to do.
        row_I: whose.
        prefix_I: tokens of the row that earlier steps wrote.
    """

    token_I: jax.Array
    count_I: jax.Array
    row_I: jax.Array
    prefix_I: jax.Array


def plan_tokens(
    T: int,
    query_start_Q: jax.Array,
    context_len_R: jax.Array,
    ancestors_TU: jax.Array | None,
    window: int | None,
    slots_before: Callable[[jax.Array], jax.Array],
) -> tuple[Tokens, jax.Array]:
    """What every token sees, and its row.

    Args:
        slots_before: from positions to the number of slots before them.
    """
    token_T = jnp.arange(T, dtype=jnp.int32)
    row_T = _count_below(query_start_Q[1:], token_T)
    owned_T = row_T < context_len_R.shape[0]
    row_T = jnp.where(owned_T, row_T, 0)
    prefix_T = (context_len_R - _lengths(query_start_Q))[row_T]
    position_T = prefix_T + token_T - query_start_Q[row_T]
    solid_T = limit_T = position_T + 1
    if ancestors_TU is not None:
        tree_T = (ancestors_TU != 0).any(-1)
        depth_T = jax.lax.population_count(ancestors_TU).astype(jnp.int32).sum(-1) - 1
        position_T = jnp.where(tree_T, prefix_T + depth_T, position_T)
        solid_T = jnp.where(tree_T, prefix_T, solid_T)
        limit_T = jnp.where(tree_T, context_len_R[row_T], limit_T)
    first_T = jnp.zeros_like(position_T)
    if window is not None:
        first_T = slots_before(jnp.maximum(position_T - window + 1, 0))
    solid_T, limit_T = (jnp.where(owned_T, slots_before(x_T), 0) for x_T in (solid_T, limit_T))
    return Tokens(first_T, solid_T, limit_T), row_T


def one_token_tiles(row_T: jax.Array, query_start_Q: jax.Array, context_len_R: jax.Array) -> Tiles:
    """A tile per token, whatever rows they belong to."""
    token_T = jnp.arange(row_T.shape[0], dtype=jnp.int32)
    prefix_R = context_len_R - _lengths(query_start_Q)
    return Tiles(token_T, jnp.ones_like(token_T), row_T, prefix_R[row_T])


def decode_tiles(query_start_Q: jax.Array, context_len_R: jax.Array) -> Tiles:
    """A tile per row, for the rows with one token; the others are empty."""
    length_R = _lengths(query_start_Q)
    row_R = jnp.arange(length_R.shape[0], dtype=jnp.int32)
    return Tiles(query_start_Q[:-1], (length_R == 1).astype(jnp.int32), row_R, context_len_R - length_R)


def query_tile_bound(T: int, R: int, tokens: int) -> int:
    """Tiles that ``query_tiles`` needs at most: full ones, one rest a row with two tokens or more, one of padding."""
    return T // tokens + min(R, T // 2) + 1


def query_tiles(T: int, tokens: int, query_start_Q: jax.Array, context_len_R: jax.Array) -> Tiles:
    """Tiles of up to ``tokens`` tokens for the rows with two or more, and for the tokens that no row owns.

    Heavy tiles come first: the last ones of a prefill chunk see most.
    """
    R = context_len_R.shape[0]
    I = query_tile_bound(T, R, tokens)
    length_R = _lengths(query_start_Q)
    start_P = query_start_Q
    length_P = jnp.concatenate([jnp.where(length_R == 1, 0, length_R), T - query_start_Q[-1:]])
    prefix_P = jnp.concatenate([context_len_R - length_R, jnp.zeros(1, jnp.int32)])
    tiles_P = (length_P + tokens - 1) // tokens
    end_P = jnp.cumsum(tiles_P)
    tile_I = jnp.arange(I - 1, -1, -1, dtype=jnp.int32)
    part_I = _count_below(end_P, tile_I)
    used_I = part_I <= R
    part_I = jnp.minimum(part_I, R)
    done_I = (tile_I - (end_P - tiles_P)[part_I]) * tokens
    count_I = jnp.where(used_I, jnp.clip(length_P[part_I] - done_I, 0, tokens), 0)
    return Tiles(start_P[part_I] + done_I, count_I, jnp.minimum(part_I, R - 1), prefix_P[part_I])


def _lengths(query_start_Q: jax.Array) -> jax.Array:
    return query_start_Q[1:] - query_start_Q[:-1]


def _count_below(end_P: jax.Array, value_I: jax.Array) -> jax.Array:
    """How many ends are at or below each value: a search by comparison, one fused operation on a GPU."""
    return (end_P[None, :] <= value_I[:, None]).sum(-1, dtype=jnp.int32)
