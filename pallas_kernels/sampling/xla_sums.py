"""Sums and picks of rows in XLA, whose additions have an order that does not depend on the number of rows.

XLA may add the terms of a reduction in an order that depends on the whole shape, so they are spelled out here.
"""

import jax
import jax.numpy as jnp

GROUP = 128


def total(x_PX: jax.Array) -> jax.Array:
    """Sum over the last axis."""
    size = x_PX.shape[-1]
    widths = [(0, 0)] * (x_PX.ndim - 1) + [(0, (1 << (size - 1).bit_length()) - size)]
    x_PX = jnp.pad(x_PX, widths)
    while x_PX.shape[-1] > 1:
        half = x_PX.shape[-1] // 2
        x_PX = x_PX[..., :half] + x_PX[..., half:]
    return x_PX[..., 0]


def split_groups(x_PV: jax.Array, fill: float) -> jax.Array:
    """Cuts [P, V] into [P, G, 128]; a ragged end is filled up."""
    rows, V = x_PV.shape
    return jnp.pad(x_PV, ((0, 0), (0, -V % GROUP)), constant_values=fill).reshape(rows, -1, GROUP)


def take_group(x_PGJ: jax.Array, group_P: jax.Array) -> jax.Array:
    """One group of each row, [P, 128]."""
    return jnp.take_along_axis(x_PGJ, group_P[:, None, None], axis=1)[:, 0]


def pick(mass_PX: jax.Array, target_P: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First entry of positive mass whose prefix sum exceeds the target, and what the entries before it leave of the
    target. Rounding may leave no such entry; then the last one of positive mass."""
    size = mass_PX.shape[-1]
    index_X = jnp.arange(size, dtype=jnp.int32)
    prefix_PX = _prefix_sums(mass_PX)
    beyond_PX = (mass_PX > 0) & (prefix_PX > target_P[:, None])
    first_P = jnp.where(beyond_PX, index_X, size).min(-1)
    index_P = jnp.minimum(first_P, jnp.where(mass_PX > 0, index_X, 0).max(-1))
    before_PX = jnp.pad(prefix_PX, ((0, 0), (1, 0)))
    return index_P, target_P - jnp.take_along_axis(before_PX, index_P[:, None], axis=1)[:, 0]


def _prefix_sums(x_PX: jax.Array) -> jax.Array:
    """Inclusive prefix sums, by doubling steps."""
    step = 1
    while step < x_PX.shape[-1]:
        x_PX += jnp.pad(x_PX[:, :-step], ((0, 0), (step, 0)))
        step *= 2
    return x_PX
