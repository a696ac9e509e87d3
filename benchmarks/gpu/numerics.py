"""How far two results are apart."""

from typing import Any

import jax
import jax.numpy as jnp


@jax.jit
def _error(found: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Largest difference and largest magnitude, float32; NaN in the same place is no difference."""
    a, b = (x.astype(jnp.float32) for x in (found, wanted))
    same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    difference = jnp.where(same, 0.0, jnp.abs(a - b))
    difference = jnp.where(jnp.isnan(difference), jnp.inf, difference)
    magnitude = jnp.where(jnp.isfinite(b), jnp.abs(b), 0.0)
    return jnp.max(difference, initial=0.0), jnp.max(magnitude, initial=0.0)


def largest_error(found: Any, wanted: Any) -> float:
    """Largest difference of an array, relative to its largest magnitude; the worst of all arrays of a pytree.

    Raises:
        ValueError: the results have different numbers of arrays or shapes.
    """
    ours, theirs = jax.tree.leaves(found), jax.tree.leaves(wanted)
    shapes = [x.shape for x in ours], [x.shape for x in theirs]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the kernel returns shapes {shapes[0]}, its oracle {shapes[1]}")
    worst = 0.0
    for a, b in zip(ours, theirs):
        difference, magnitude = (float(x) for x in _error(a, b))
        if difference > 0:
            worst = max(worst, difference / magnitude if magnitude > 0 else float("inf"))
    return worst
