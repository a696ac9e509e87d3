"""Cuts ragged row groups into tiles of rows, each of one group, on the device: the work list of a static grid."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tiles(NamedTuple):
    """P tiles, int32 ``[P]`` each; those that are not needed are empty and come last.

    Attributes:
        expert_P: whose rows they are; E for rows of no expert, behind those of the last one.
        first_P: first row.
        stop_P: the row behind the last one of the expert; the tile is empty if it is not behind ``first_P``.
    """

    expert_P: jax.Array
    first_P: jax.Array
    stop_P: jax.Array


def count(T: int, E: int, rows: int) -> int:
    """The most tiles that T rows in E groups, and a rest that belongs to none, can need.

    A group of s rows needs ``ceil(s / rows) <= (s + rows - 1) / rows`` tiles, and at most ``min(T, E + 1)`` have one.
    """
    return (T + min(T, E + 1) * (rows - 1)) // rows


def make(group_sizes_E: jax.Array, T: int, rows: int) -> Tiles:
    """The tiles of up to ``rows`` rows of all groups, in the order of the rows; every row is in one of them.

    Written as two reductions over comparisons, each of which is one kernel on a GPU: scans and searches are several.
    """
    # Clipped, so that no wrong size leads outside of the rows. ``lax.div``, because the floor division of signed
    # numbers is so long that XLA gives it a kernel of its own.
    size_E = jnp.clip(group_sizes_E, 0, T)
    tiles_E = jax.lax.div(size_E + (rows - 1), rows)
    expert_E = jnp.arange(len(size_E))
    upto_EE = expert_E[None, :] <= expert_E[:, None]
    row_end_E = jnp.minimum(jnp.sum(jnp.where(upto_EE, size_E[None, :], 0), axis=1), T)
    tile_end_E = jnp.sum(jnp.where(upto_EE, tiles_E[None, :], 0), axis=1)

    tile_P1 = jnp.arange(count(T, len(size_E), rows), dtype=jnp.int32)[:, None]
    before_PE = tile_end_E[None, :] <= tile_P1
    # A group of s rows takes tiles for at least s rows, so what its tiles are ahead of its rows only grows.
    behind_E = row_end_E - rows * tile_end_E
    found_PE = (
        before_PE.astype(jnp.int32),
        jnp.where(before_PE, behind_E[None, :], 0) + rows * tile_P1,
        jnp.where(before_PE, T, row_end_E[None, :]),
    )
    return Tiles(*jax.lax.reduce(found_PE, (0, 2**31 - 1, T), _sum_and_minima, (1,)))


def _sum_and_minima(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return a[0] + b[0], jnp.minimum(a[1], b[1]), jnp.minimum(a[2], b[2])
