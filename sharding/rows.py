"""Rows that the devices of a mesh axis split among themselves, and send to each other."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class RowExchange:
    """When the devices that share experts split the rows of a program, and how they send them.

    Attributes:
        least_rows: programs with fewer rows do not.
        ragged: only rows that count travel. XLA has that for GPUs, not for CPUs, where blocks of full size travel.
    """

    least_rows: int
    ragged: bool


def exchange(
    x_TD: jax.Array, send_N: jax.Array, receive_N: jax.Array, axis: str, *, ragged: bool
) -> jax.Array:
    """Sends block d of N equal blocks of rows to device d.

    Args:
        send_N: rows that count of each block, the first ones; int32. What the others arrive as is not defined.
        receive_N: as many as the others send; int32.

    Returns:
        The block of device s is block s, ``[T, D]``.
    """
    if not ragged:
        return lax.all_to_all(x_TD, axis, split_axis=0, concat_axis=0, tiled=True)
    N = send_N.shape[0]
    R = x_TD.shape[0] // N
    first_N = R * jnp.arange(N, dtype=jnp.int32)
    mine_N = jnp.full((N,), R, jnp.int32) * lax.axis_index(axis)
    return lax.ragged_all_to_all(
        x_TD, jnp.zeros_like(x_TD), first_N, send_N, mine_N, receive_N, axis_name=axis
    )
