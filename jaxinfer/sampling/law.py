"""The processed law: how edited logits become probabilities, and a draw from it.

``p(v) = exp((l_v - max) / temperature) / mass`` for the tokens with ``l_v >= threshold``, and 0 for the
others. Top-k, top-p and min-p all keep the tokens above some logit, so one threshold per row describes every
truncation.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from jaxinfer.sampling.groups import GROUP, pick, prefix_sums
from jaxinfer.sampling.inputs import SamplingInputs
from jaxinfer.sampling.vocabulary import Vocabulary


@register_dataclass
@dataclass(frozen=True)
class Law:
    """The processed law of P rows, relative to their edited logits; all float32 [P].

    A greedy row has temperature 1 and no threshold: its processed log-probabilities are those of the edited
    logits.

    Attributes:
        max_P: largest edited logit.
        temperature_P: positive.
        threshold_P: smallest logit that is kept; -inf keeps all.
    """

    max_P: jax.Array
    temperature_P: jax.Array
    threshold_P: jax.Array


def untruncated(max_P: jax.Array, inputs: SamplingInputs) -> Law:
    """The law before top-k, top-p and min-p."""
    random_P = inputs.temperature_P > 0
    return Law(
        max_P=max_P,
        temperature_P=jnp.where(random_P, inputs.temperature_P, 1.0),
        threshold_P=jnp.full_like(max_P, -jnp.inf),
    )


def scores(logits_PX: jax.Array, law: Law) -> jax.Array:
    """Log of the weights, [P, ...]: at most 0, -inf where the token is not kept.

    The maximum is subtracted before the division, so that no temperature overflows.
    """
    shape = (-1,) + (1,) * (logits_PX.ndim - 1)
    scaled_PX = (logits_PX - law.max_P.reshape(shape)) / law.temperature_P.reshape(shape)
    return jnp.where(logits_PX >= law.threshold_P.reshape(shape), scaled_PX, -jnp.inf)


def weights(logits_PX: jax.Array, law: Law) -> jax.Array:
    """Unnormalised probabilities, [P, ...]; the most likely token has 1."""
    return jnp.exp(scores(logits_PX, law))


def uniforms(key_P2: jax.Array, position_P: jax.Array) -> jax.Array:
    """One float32 in (0, 1) per row: counter-based, from the row's key data and the position alone."""

    def one(key_2: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key_2, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, position), (), jnp.uint32)

    bits_P = jax.vmap(one)(key_P2, position_P)
    # The half step keeps 0 out, which would give the first token of any positive mass, however small.
    return jnp.minimum(bits_P.astype(jnp.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)


def draw(
    logits_PGJ: jax.Array, law: Law, mass_PG: jax.Array, uniform_P: jax.Array, vocab: Vocabulary
) -> jax.Array:
    """Inverse CDF in token-id order: the first token whose cumulative probability exceeds the uniform number.

    Args:
        logits_PGJ: edited logits, float32.
        law: of each row.
        mass_PG: sums of ``weights`` over all groups.
        uniform_P: float32 in (0, 1).

    Returns:
        int32 [P]. Probabilities are resolved to about 2**-24 of the total.
    """
    prefix_PG = prefix_sums(mass_PG)
    end_P = prefix_PG[:, -1]
    target_P = jnp.minimum(uniform_P * end_P, jnp.nextafter(end_P, jnp.zeros_like(end_P)))
    group_P = pick(mass_PG, prefix_PG, target_P)
    before_PG = jnp.pad(prefix_PG[:, :-1], ((0, 0), (1, 0)))
    rest_P = target_P - jnp.take_along_axis(before_PG, group_P[:, None], axis=1)[:, 0]
    weight_PJ = weights(vocab.group(logits_PGJ, group_P), law)
    return group_P * GROUP + pick(weight_PJ, prefix_sums(weight_PJ), rest_P)
