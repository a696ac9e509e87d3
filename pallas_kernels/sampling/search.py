"""Search for a threshold among logits, by passes that compare them with a pivot: no sort."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

Measured = tuple[jax.Array, jax.Array, jax.Array]
# 32 halvings exhaust the bit patterns of float32; the rest is a margin for numbers that a device flushes to zero.
_MOST_STEPS = 40


def largest_reaching(
    measure: Callable[[jax.Array], Measured], need: jax.Array, low: jax.Array, top: jax.Array
) -> jax.Array:
    """The largest logit x with ``measure(x) >= need``, for a measure of the logits not below a pivot.

    Bisection over the bit patterns of float32, which are ordered like the numbers. Every pass also moves its end to
    the next logit that exists, so that the search takes about log2(logits between the ends) passes and ends on a
    logit, ties or not.

    Args:
        measure: from a pivot to the measure, the smallest logit that is not below it, and the largest below it.
        need: what is to be reached, of the dtype of the measure.
        low: a number that reaches it; returned if no larger logit does.
        top: the largest logit. float32 scalars, or one entry per row; also the result.
    """

    def is_open(search: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        step, low, top = search
        unsettled = low < top
        return (step < _MOST_STEPS) & (unsettled.any() if unsettled.ndim else unsettled)

    def narrow(search: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        step, low, top = search
        measured, kept, dropped = measure(_value(_middle(_key(low), _key(top))))
        unsettled, reached = low < top, measured >= need
        return (
            step + 1,
            jnp.where(unsettled & reached, kept, low),
            jnp.where(unsettled & ~reached, dropped, top),
        )

    return lax.while_loop(is_open, narrow, (jnp.int32(0), low, top))[1]


def _key(x: jax.Array) -> jax.Array:
    """int32 that is ordered like the float32."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _value(key: jax.Array) -> jax.Array:
    """The float32 of a key."""
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)


def _middle(low: jax.Array, high: jax.Array) -> jax.Array:
    """Mean rounded up, without overflow."""
    return (low | high) - ((low ^ high) >> 1)
