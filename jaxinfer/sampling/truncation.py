"""Top-k, top-p and min-p as one threshold per row, found without sorting the vocabulary.

The largest ``CANDIDATES`` logits of each row settle almost every request. Rows that need more (a large k, a
flat distribution) are settled by bisection over the bit patterns of float32, which are ordered like the
numbers: at most 32 passes find the exact threshold. Which of the two settles a row depends on that row alone.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sampling.groups import group_sum, prefix_sums, row_count, row_sum, total
from jaxinfer.sampling.law import Law, weights
from jaxinfer.sampling.vocabulary import Vocabulary

CANDIDATES = 64

Search = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def truncate(
    logits_PGJ: jax.Array,
    max_PG: jax.Array,
    law: Law,
    mass_PG: jax.Array,
    top_k_P: jax.Array,
    top_p_P: jax.Array,
    min_p_P: jax.Array,
    vocab: Vocabulary,
) -> Law:
    """Applies top-k, then top-p to what is left, then min-p.

    Top-k keeps every token tied with the k-th. Top-p keeps the smallest set of most likely tokens that holds
    the mass, and all tokens tied with its last one. Min-p keeps the tokens with at least that share of the
    largest probability.

    Args:
        logits_PGJ: edited logits, float32.
        max_PG: group maxima of the logits.
        law: untruncated.
        mass_PG: sums of the untruncated weights over all groups.
        top_k_P: int32, at least 1; the padded size of the vocabulary or more is off.
        top_p_P: float32 in (0, 1]; 1 is off.
        min_p_P: float32 in [0, 1]; 0 is off.

    Returns:
        The law with its threshold.
    """
    values_PC, _ = vocab.top(logits_PGJ, max_PG, CANDIDATES)
    law = replace(law, threshold_P=_top_k_threshold(logits_PGJ, max_PG, values_PC, top_k_P, vocab))
    nucleus_P = _top_p_threshold(logits_PGJ, values_PC, law, mass_PG, top_p_P, vocab)
    floor_P = law.max_P + law.temperature_P * jnp.log(min_p_P)
    return replace(law, threshold_P=jnp.maximum(jnp.maximum(law.threshold_P, nucleus_P), floor_P))


def _top_k_threshold(
    logits_PGJ: jax.Array, max_PG: jax.Array, values_PC: jax.Array, top_k_P: jax.Array, vocab: Vocabulary
) -> jax.Array:
    """The k-th largest logit, or a number between it and the next smaller one."""
    off_P = top_k_P >= vocab.padded
    known_P = off_P | (top_k_P <= CANDIDATES)
    kth_P = _at(values_PC, jnp.minimum(top_k_P, CANDIDATES) - 1)
    kth_P = jnp.where(off_P, -jnp.inf, kth_P)

    def search() -> jax.Array:
        # The k-th largest group maximum is a lower bound: k groups hold a logit as large.
        ascending_PG = jnp.sort(vocab.all_groups(max_PG), axis=-1)
        groups = ascending_PG.shape[1]
        bound_P = _at(ascending_PG, jnp.clip(groups - top_k_P, 0, groups - 1))
        low_P = _key(jnp.where(top_k_P <= groups, bound_P, -jnp.inf))
        high_P = _key(values_PC[:, -1]) + 1

        def count(pivot_P: jax.Array) -> jax.Array:
            return vocab.sum(row_count(logits_PGJ >= pivot_P[:, None, None]))

        def settled(low_P: jax.Array, at_low_P: jax.Array, at_high_P: jax.Array) -> jax.Array:
            return at_low_P == top_k_P

        start_P = jnp.full_like(top_k_P, vocab.padded)
        found_P = _bisect(count, top_k_P, settled, known_P, low_P, high_P, start_P)
        return jnp.where(known_P, kth_P, found_P)

    return lax.cond(jnp.all(known_P), lambda: kth_P, search)


def _top_p_threshold(
    logits_PGJ: jax.Array,
    values_PC: jax.Array,
    law: Law,
    mass_PG: jax.Array,
    top_p_P: jax.Array,
    vocab: Vocabulary,
) -> jax.Array:
    """The smallest logit of the nucleus of the law; -inf where top-p is off."""

    def sum_rows(x_PGJ: jax.Array) -> jax.Array:
        return total(vocab.all_groups(group_sum(x_PGJ))) if vocab.shared else row_sum(x_PGJ)

    weight_PC = weights(values_PC, law)
    untruncated_P = law.threshold_P == -jnp.inf
    mass_P = jnp.where(untruncated_P, total(mass_PG), total(weight_PC))
    # With top-k on, the candidates are all that is left only if its threshold lies above the last of them.
    mass_known_P = untruncated_P | (law.threshold_P > values_PC[:, -1])
    reached_PC = prefix_sums(weight_PC) >= (top_p_P * mass_P)[:, None]
    off_P = top_p_P >= 1
    known_P = off_P | (mass_known_P & reached_PC.any(-1))
    nucleus_P = jnp.where(off_P, -jnp.inf, _at(values_PC, jnp.argmax(reached_PC, axis=-1)))

    def search() -> jax.Array:
        weight_PGJ = weights(logits_PGJ, law)
        mass_P = sum_rows(weight_PGJ)
        need_P = top_p_P * mass_P
        # All tokens below this weight together have less than the mass that may be dropped.
        low_P = _key((1 - top_p_P) * mass_P / vocab.padded * 0.99)
        above_P = total(jnp.where(values_PC > values_PC[:, -1:], weight_PC, 0))
        high_P = _key(jnp.where(above_P < need_P, weight_PC[:, -1], 1.0)) + 1

        def mass(pivot_P: jax.Array) -> jax.Array:
            return sum_rows(jnp.where(weight_PGJ >= pivot_P[:, None, None], weight_PGJ, 0))

        def settled(low_P: jax.Array, at_low_P: jax.Array, at_high_P: jax.Array) -> jax.Array:
            return at_low_P - at_high_P < 1.5 * low_P  # at most one token lies between the two

        pivot_P = _bisect(mass, need_P, settled, known_P, low_P, high_P, mass_P)
        kept_PGJ = jnp.where(weight_PGJ >= pivot_P[:, None, None], logits_PGJ, jnp.inf)
        return jnp.where(known_P, nucleus_P, vocab.smallest(kept_PGJ.min(-1).min(-1)))

    return lax.cond(jnp.all(known_P), lambda: nucleus_P, search)


def _bisect(
    measure: Callable[[jax.Array], jax.Array],
    need_P: jax.Array,
    settled: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    known_P: jax.Array,
    low_P: jax.Array,
    high_P: jax.Array,
    at_low_P: jax.Array,
) -> jax.Array:
    """A pivot, float32 [P], that selects the smallest set with ``measure(pivot) >= need``; ``measure`` falls.

    Args:
        measure: of the entries not below the float32 pivots [P].
        need_P: what the set must reach.
        settled: from the low pivot and the measures at both ends, whether the low pivot already selects that
            set.
        known_P: rows that are not searched.
        low_P, high_P: keys of float32 pivots that reach the need, and do not.
        at_low_P: ``measure`` at the low end, or an upper bound of it.
    """
    high_P = jnp.maximum(high_P, low_P + 1)

    def open_rows(
        low_P: jax.Array, high_P: jax.Array, at_low_P: jax.Array, at_high_P: jax.Array
    ) -> jax.Array:
        found_P = (_middle(low_P, high_P) == low_P) | settled(_value(low_P), at_low_P, at_high_P)
        return ~(known_P | found_P)

    def narrow(search: Search) -> Search:
        low_P, high_P, at_low_P, at_high_P, open_P = search
        middle_P = _middle(low_P, high_P)
        measured_P = measure(_value(middle_P))
        raised_P = open_P & (measured_P >= need_P)
        lowered_P = open_P & ~raised_P
        low_P = jnp.where(raised_P, middle_P, low_P)
        high_P = jnp.where(lowered_P, middle_P, high_P)
        at_low_P = jnp.where(raised_P, measured_P, at_low_P)
        at_high_P = jnp.where(lowered_P, measured_P, at_high_P)
        return low_P, high_P, at_low_P, at_high_P, open_rows(low_P, high_P, at_low_P, at_high_P)

    at_high_P = jnp.zeros_like(at_low_P)
    search = (low_P, high_P, at_low_P, at_high_P, open_rows(low_P, high_P, at_low_P, at_high_P))
    return _value(lax.while_loop(lambda search: search[4].any(), narrow, search)[0])


def _at(x_PX: jax.Array, index_P: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_PX, index_P[:, None], axis=1)[:, 0]


def _key(x_P: jax.Array) -> jax.Array:
    """int32 that is ordered like the float32."""
    bits_P = lax.bitcast_convert_type(x_P, jnp.int32)
    return jnp.where(bits_P < 0, bits_P ^ 0x7FFFFFFF, bits_P)


def _value(key_P: jax.Array) -> jax.Array:
    """The float32 of a key."""
    return lax.bitcast_convert_type(jnp.where(key_P < 0, key_P ^ 0x7FFFFFFF, key_P), jnp.float32)


def _middle(low_P: jax.Array, high_P: jax.Array) -> jax.Array:
    """Mean rounded down, without overflow."""
    return (low_P & high_P) + ((low_P ^ high_P) >> 1)
