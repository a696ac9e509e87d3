"""Passes over the vocabulary, cut into groups of 128 tokens in id order.

Two levels keep every pass a plain streaming one: the vocabulary is neither sorted nor scanned. Sums are spelled
out as additions, in an order that does not depend on how many rows there are, so the results of a row are the
same bits for every number of padded rows.

Letters: G groups of the vocabulary, J = 128 tokens of a group, C candidates.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

GROUP = 128
_FAN = 16


def split_groups(x_PV: jax.Array) -> jax.Array:
    """Cuts [P, V] into [P, G, J]; a ragged end is filled with -inf."""
    rows, vocab = x_PV.shape
    x_PV = jnp.pad(x_PV, ((0, 0), (0, -vocab % GROUP)), constant_values=-jnp.inf)
    return x_PV.reshape(rows, -1, GROUP)


def take_group(x_PGJ: jax.Array, group_P: jax.Array) -> jax.Array:
    """One group of each row, [P, J]."""
    return jnp.take_along_axis(x_PGJ, group_P[:, None, None], axis=1)[:, 0]


def group_max(x_PGJ: jax.Array) -> jax.Array:
    """Largest entry of each group, [P, G]. NaN may be ignored: see ``finite_rows``."""
    return x_PGJ.max(-1)


def group_sum(x_PGJ: jax.Array) -> jax.Array:
    """Sum of each group, [P, G]."""
    return _fold(x_PGJ)


def total(x_PG: jax.Array) -> jax.Array:
    """Sum over the last axis, [P]."""
    size = x_PG.shape[-1]
    return _fold(jnp.pad(x_PG, ((0, 0), (0, _power_of_two(size) - size))))


def row_sum(x_PGJ: jax.Array) -> jax.Array:
    """Sum of each row, [P], where the sums of the groups do not matter: groups are added to each other first."""
    while x_PGJ.shape[1] > 1:
        x_PGJ = _fold_groups(x_PGJ)
    return _fold(x_PGJ[:, 0])


def row_count(x_PGJ: jax.Array) -> jax.Array:
    """Number of true entries of each row, int32 [P]."""
    return _fold_groups(x_PGJ.astype(jnp.int32)).sum((1, 2))


def _fold_groups(x_PGJ: jax.Array) -> jax.Array:
    """Adds each 8 groups to one, which vectorises on CPUs; the barrier keeps it apart from what follows."""
    x_PGJ = jnp.pad(x_PGJ, ((0, 0), (0, -x_PGJ.shape[1] % 8), (0, 0)))
    for _ in range(3):
        half = x_PGJ.shape[1] // 2
        x_PGJ = x_PGJ[:, :half] + x_PGJ[:, half:]
    return lax.optimization_barrier(x_PGJ)


def prefix_sums(x_PG: jax.Array) -> jax.Array:
    """Inclusive prefix sums along the last axis, in log16(G) levels (``jnp.cumsum`` is slow on CPUs)."""
    rows, size = x_PG.shape
    inner_PGF = jnp.pad(x_PG, ((0, 0), (0, -size % _FAN))).reshape(rows, -1, _FAN)
    for step in (1, 2, 4, 8):
        inner_PGF += jnp.pad(inner_PGF[..., :-step], ((0, 0), (0, 0), (step, 0)))
    if inner_PGF.shape[1] > 1:
        ends_PG = prefix_sums(inner_PGF[:, :, -1])
        inner_PGF += jnp.pad(ends_PG[:, :-1], ((0, 0), (1, 0)))[:, :, None]
    return inner_PGF.reshape(rows, -1)[:, :size]


def _fold(x_PX: jax.Array) -> jax.Array:
    """Adds the halves of the last axis, a power of two, until one number is left.

    Written as additions because XLA may add the terms of a reduction in an order that depends on the shape. It is
    also the faster form on CPUs, where it vectorises.
    """
    while x_PX.shape[-1] > 1:
        half = x_PX.shape[-1] // 2
        x_PX = x_PX[..., :half] + x_PX[..., half:]
    return x_PX[..., 0]


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def finite_rows(
    x_PV: jax.Array, over_devices: Callable[[jax.Array], jax.Array] = lambda x_P: x_P
) -> jax.Array:
    """Whether a row is free of NaN and +inf, [P]; -inf is fine.

    A sum shows them where a maximum need not: XLA's fast CPU maximum drops NaN. A row whose finite entries
    sum to more than the largest float32 counts as not finite.

    Args:
        over_devices: the sum over the devices that share the row.
    """
    return over_devices(x_PV.sum(-1)) < jnp.inf


def first_argmax(x_PGJ: jax.Array, max_PG: jax.Array) -> jax.Array:
    """Id of the largest entry of each row, ties to the lowest id, int32 [P]; one pass less than
    ``jnp.argmax``.
    """
    group_P = jnp.argmax(max_PG, axis=-1).astype(jnp.int32)
    inner_P = jnp.argmax(take_group(x_PGJ, group_P), axis=-1)
    return group_P * GROUP + inner_P.astype(jnp.int32)


def top_tokens(x_PGJ: jax.Array, max_PG: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The ``count`` largest entries of each row, best first, ties to the lowest id.

    The groups with the ``count`` largest maxima hold them all, so only those are searched. ``count`` <= 128.

    Returns:
        Values [P, count] and ids int32 [P, count]. With fewer than ``count`` tokens in the vocabulary the
        tail is -inf with ids beyond it.
    """
    rows, groups, _ = x_PGJ.shape
    _, chosen_PG = lax.top_k(max_PG, min(count, groups))
    chosen_PG = lax.sort(chosen_PG, is_stable=False)  # id order, so that ties go to the lowest id
    candidates_PC = jnp.take_along_axis(x_PGJ, chosen_PG[:, :, None], axis=1).reshape(rows, -1)
    values_PX, place_PX = largest(candidates_PC, count)
    group_PX = jnp.take_along_axis(chosen_PG, place_PX // GROUP, axis=1)
    return values_PX, group_PX * GROUP + place_PX % GROUP


def largest(x_PX: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The ``count`` largest entries of each row, best first, and where they are; ties to the first."""
    # The barrier keeps XLA from turning a top-k whose places nobody reads into a full sort. It holds the operand too:
    # around a top-k alone, it makes the compiler of programs for several CPU devices abort (jaxlib 0.10.2).
    values_PX, place_PX, _ = lax.optimization_barrier((*lax.top_k(x_PX, count), x_PX))
    return values_PX, place_PX


def pick(mass_PG: jax.Array, prefix_PG: jax.Array, target_P: jax.Array) -> jax.Array:
    """Index of the first entry with positive mass whose prefix sum exceeds the target, int32 [P].

    Rounding may leave no such entry; then the last one with positive mass.
    """
    index_G = jnp.arange(mass_PG.shape[-1], dtype=jnp.int32)
    positive_PG = mass_PG > 0
    beyond_PG = positive_PG & (prefix_PG > target_P[:, None])
    first_P = jnp.where(beyond_PG, index_G, mass_PG.shape[-1]).min(-1)
    last_P = jnp.where(positive_PG, index_G, 0).max(-1)
    return jnp.minimum(first_P, last_P)
