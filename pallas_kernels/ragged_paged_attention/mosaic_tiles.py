"""Tiles of queries for the Mosaic backend: which 128 rows of the score matrix each thread block computes.

A *unit* is 8 consecutive tokens of one query head; its first token is a multiple of 8, because a swizzled TMA copy
can only start there. The units of a row of the batch are numbered token group by token group, within it by the G
query heads of one KV head, so that a tile of 16 consecutive units is filled whatever G is: 16 heads of one group of
tokens, 4 heads of 4 groups, or 7 heads of 2 groups and 2 of the next.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

UNIT_TOKENS = 8
WARPGROUP_UNITS = 8
TILE_UNITS = 2 * WARPGROUP_UNITS
FIELDS = 8


@dataclass(frozen=True)
class Tile:
    """Scalars of one tile, as the kernel reads them.

    Attributes:
        row: of the block table.
        group: the group of 8 tokens in which the row starts.
        unit: first of the tile's 16 units.
        start, end: tokens of the row; nothing else is written. Equal in an empty tile.
        shift: what makes a token's index its position in the context.
        context: length of the row's context.
        first: the first position that a query of the tile may see.
    """

    row: jax.Array
    group: jax.Array
    unit: jax.Array
    start: jax.Array
    end: jax.Array
    shift: jax.Array
    context: jax.Array
    first: jax.Array


def tile_bound(T: int, R: int, G: int) -> int:
    """Most tiles that R rows of two or more tokens and the padding behind them can need; T is a multiple of 8."""
    rows = min(R, T // 2) + 1
    groups = T // UNIT_TOKENS + rows - 1
    return (groups * G + (TILE_UNITS - 1) * rows) // TILE_UNITS


def tile_list(
    query_start_Q: jax.Array, context_len_R: jax.Array, T: int, G: int, window: int | None
) -> jax.Array:
    """Describes the tiles of every row of more than one token, and of the padding, whose context is empty.

    Returns:
        int32 [I, FIELDS]: the fields of ``Tile``; the last tiles of a row, which see most, come first. Unused tiles
        have no tokens.
    """
    R = context_len_R.shape[0]
    I = tile_bound(T, R, G)
    start_P = jnp.clip(query_start_Q, 0, T)
    end_P = jnp.append(start_P[1:], T)
    context_P = jnp.append(context_len_R, 0)
    length_P = end_P - start_P
    mine_P = (length_P > 1).at[R].set(length_P[R] > 0)
    group_P = start_P // UNIT_TOKENS
    units_P = (-(-end_P // UNIT_TOKENS) - group_P) * G
    tiles_P = jnp.where(mine_P, -(-units_P // TILE_UNITS), 0)
    last_P = jnp.cumsum(tiles_P)
    tile_I = jnp.arange(I)
    row_I = jnp.minimum((last_P <= tile_I[:, None]).sum(1), R)
    used_I = tile_I < last_P[R]
    unit_I = (last_P[row_I] - 1 - tile_I) * TILE_UNITS
    group_I = group_P[row_I]
    start_I, end_I, context_I = start_P[row_I], jnp.where(used_I, end_P[row_I], 0), context_P[row_I]
    shift_I = jnp.where(row_I == R, -T, context_I - end_P[row_I])
    first_I = jnp.maximum((group_I + unit_I // G) * UNIT_TOKENS, start_I) + shift_I
    first_I = jnp.zeros_like(first_I) if window is None else jnp.maximum(first_I - window + 1, 0)
    start_I = jnp.where(used_I, start_I, 0)
    fields = (jnp.minimum(row_I, R - 1), group_I, unit_I, start_I, end_I, shift_I, context_I, first_I)
    return jnp.stack(fields, axis=1).astype(jnp.int32)
