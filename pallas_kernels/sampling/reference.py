"""A draw from truncated softmax laws: the semantics, in plain jnp and float32, with a sort. Slow; used by tests."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass


@register_dataclass
@dataclass(frozen=True)
class Draws:
    """A token of each of P rows, and the law that it was drawn from.

    A random row has ``p(v) = exp((l_v - max) / temperature) / mass`` for the tokens with ``l_v >= threshold``, and 0
    for the others. A greedy row has all probability on its token.

    Attributes:
        token_P: int32; 0 in an unhealthy row.
        healthy_P: bool; False where the logits hold NaN or +inf, or nothing but -inf. The law of such a row means
            nothing.
        max_P: float32, largest logit.
        temperature_P: float32, as given; 0 means greedy.
        threshold_P: float32, smallest logit that is kept; -inf if nothing is cut off, and in greedy rows.
        mass_P: float32, sum of the weights ``exp((l_v - max) / temperature)`` that are kept. In a greedy row that of
            temperature 1, as its log-probabilities need.
    """

    token_P: jax.Array
    healthy_P: jax.Array
    max_P: jax.Array
    temperature_P: jax.Array
    threshold_P: jax.Array
    mass_P: jax.Array


def truncated_draw(
    logits_PV: jax.Array,
    uniform_P: jax.Array,
    temperature_P: jax.Array,
    top_k_P: jax.Array,
    top_p_P: jax.Array,
    min_p_P: jax.Array,
) -> Draws:
    """Truncates the softmax of each row and draws one token by inverse CDF in token-id order.

    Order: temperature, top-k, top-p (Holtzman et al. 2020) of what top-k left, min-p (Nguyen et al. 2024). Top-k
    keeps all tokens tied with the k-th; top-p keeps the smallest set of most likely tokens that holds the mass, and
    all tokens tied with its last one; min-p keeps the tokens with at least that share of the largest probability. So
    one threshold on the logits describes a row. The token is the first one of positive probability whose cumulative
    probability exceeds the uniform number; probabilities are resolved to about 2**-24 of the total.

    Args:
        logits_PV: edited logits, float32, bfloat16 or float16; -inf forbids a token.
        uniform_P: float32 in (0, 1).
        temperature_P: float32; 0 means greedy: the largest logit, ties to the lowest id.
        top_k_P: int32, at least 1; V or more is off.
        top_p_P: float32 in (0, 1]; 1 is off.
        min_p_P: float32 in [0, 1]; 0 is off.

    Returns:
        What a row gets depends on that row alone.
    """
    V = logits_PV.shape[1]
    logits_PV = logits_PV.astype(jnp.float32)
    healthy_P = (logits_PV < jnp.inf).all(-1) & jnp.isfinite(logits_PV.max(-1))
    logits_PV = jnp.where(healthy_P[:, None], logits_PV, 0.0)
    random_P = temperature_P > 0
    max_P = logits_PV.max(-1)

    def weights(x_PV: jax.Array) -> jax.Array:
        return jnp.exp((x_PV - max_P[:, None]) / jnp.where(random_P, temperature_P, 1.0)[:, None])

    descending_PV = -jnp.sort(-logits_PV, axis=-1)
    kth_P = jnp.take_along_axis(descending_PV, jnp.clip(top_k_P - 1, 0, V - 1)[:, None], axis=1)[:, 0]
    kth_P = jnp.where(top_k_P < V, kth_P, -jnp.inf)
    mass_PV = jnp.cumsum(jnp.where(descending_PV >= kth_P[:, None], weights(descending_PV), 0.0), axis=-1)
    last_P = jnp.argmax(mass_PV >= top_p_P[:, None] * mass_PV[:, -1:], axis=-1)
    nucleus_P = jnp.take_along_axis(descending_PV, last_P[:, None], axis=1)[:, 0]
    nucleus_P = jnp.where(top_p_P < 1, nucleus_P, -jnp.inf)
    floor_P = max_P + temperature_P * jnp.log(min_p_P)
    bound_P = jnp.maximum(jnp.maximum(kth_P, nucleus_P), jnp.where(min_p_P > 0, floor_P, -jnp.inf))
    bound_P = jnp.where(random_P & healthy_P, bound_P, -jnp.inf)
    kept_PV = logits_PV >= bound_P[:, None]
    smallest_P = jnp.where(kept_PV, logits_PV, jnp.inf).min(-1)

    weight_PV = jnp.where(kept_PV, weights(logits_PV), 0.0)
    prefix_PV = jnp.cumsum(weight_PV, axis=-1)
    beyond_PV = (weight_PV > 0) & (prefix_PV > (uniform_P * prefix_PV[:, -1])[:, None])
    last_P = V - 1 - jnp.argmax(weight_PV[:, ::-1] > 0, axis=-1)
    drawn_P = jnp.where(beyond_PV.any(-1), jnp.argmax(beyond_PV, axis=-1), last_P)
    token_P = jnp.where(random_P, drawn_P, jnp.argmax(logits_PV, axis=-1))
    return Draws(
        token_P=jnp.where(healthy_P, token_P, 0).astype(jnp.int32),
        healthy_P=healthy_P,
        max_P=max_P,
        temperature_P=temperature_P.astype(jnp.float32),
        threshold_P=jnp.where(bound_P == -jnp.inf, -jnp.inf, smallest_P),
        mass_P=weight_PV.sum(-1),
    )
