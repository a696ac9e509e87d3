"""One sampling step on the device."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sampling.edits import any_edit, edit
from jaxinfer.sampling.groups import finite_rows, group_max, group_sum, split_groups
from jaxinfer.sampling.inputs import SamplerOutputs, SamplerState, SamplingInputs
from jaxinfer.sampling.law import Law, draw, uniforms, untruncated, weights
from jaxinfer.sampling.logprobs import no_logprobs, sampled_logprobs
from jaxinfer.sampling.state import record
from jaxinfer.sampling.truncation import truncate
from jaxinfer.sampling.typical import Typical, lossy_tokens
from jaxinfer.sampling.vocabulary import Vocabulary
from pallas_kernels.sampling.reference import Draws

Draw = Callable[..., Draws]
"""``truncated_draw`` of a kernel backend; see ``pallas_kernels.sampling``."""


def sample(
    logits_PV: jax.Array,
    inputs: SamplingInputs,
    state: SamplerState,
    draw_op: Draw | None = None,
    vocab: Vocabulary | None = None,
    typical: Typical | None = None,
) -> tuple[SamplerOutputs, SamplerState]:
    """Samples one token per row; pure and jittable, with ``state`` meant to be donated.

    Order: logit bias, allowed tokens, penalties, temperature, top-k, top-p, min-p; then inverse CDF in
    token-id order from the one uniform number of (key, position). Greedy rows take the largest edited logit,
    ties to the lowest id. What a row gets depends on that row alone, whatever its neighbours are and however
    many rows are padded.

    Args:
        logits_PV: of the model; any float type, computed in float32.
        inputs: parameters of the rows.
        state: tokens seen so far of each batch slot.
        draw_op: truncates and draws; None: the formulation of this package, made for CPUs.
        vocab: where devices share the vocabulary, of logits and state; then without ``draw_op``. None: it is all here.
        typical: lossy acceptance of drafts; None: what a row gets does not depend on drafts.

    Returns:
        Tokens with their health and log-probabilities, and the state with the tokens recorded that count: all but
        those behind a draft that was not sampled. An unhealthy row has token 0.
    """
    vocab = vocab or Vocabulary(logits_PV.shape[1])
    outputs = _outputs(logits_PV.astype(jnp.float32), inputs, state, draw_op, vocab, typical)
    return outputs, record(state, *_taken(inputs, outputs.token_P, state), vocab)


def draw_only(
    logits_PV: jax.Array,
    inputs: SamplingInputs,
    state: SamplerState,
    newest_W: jax.Array,
    draw_op: Draw | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The tokens that ``sample`` would give, [P], and an array of the newest tokens of all slots with them."""
    vocab = Vocabulary(logits_PV.shape[1])
    token_P = _outputs(logits_PV.astype(jnp.float32), inputs, state, draw_op, vocab, None).token_P
    return token_P, newest_W.at[inputs.slot_P].set(token_P)


def _outputs(
    logits_PV: jax.Array,
    inputs: SamplingInputs,
    state: SamplerState,
    draw_op: Draw | None,
    vocab: Vocabulary,
    typical: Typical | None,
) -> SamplerOutputs:
    assert draw_op is None or not vocab.shared

    def greedy_only() -> SamplerOutputs:
        token_P, healthy_P, _, _ = _choose_greedily(logits_PV, finite_rows(logits_PV, vocab.sum), vocab)
        return SamplerOutputs(token_P, healthy_P, no_logprobs(inputs))

    def anything() -> SamplerOutputs:
        return _sample(logits_PV, inputs, state, draw_op, vocab, typical)

    # One conditional around all that reads the state, so that it is dead when the tokens are recorded in
    # place.
    work = any_edit(inputs) | inputs.any_random | inputs.any_logprobs
    return lax.cond(work, anything, greedy_only)


def _taken(
    inputs: SamplingInputs, token_P: jax.Array, state: SamplerState
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What to record: the slot of each row, the spare one for rows that do not count; the tokens; and the slot whose
    newest token each row is."""
    spare = state.newest_W.shape[0] - 1

    def drafted() -> tuple[jax.Array, jax.Array]:
        first_P = inputs.before_P < 0
        before_P = jnp.maximum(inputs.before_P, 0)
        matches_P = token_P[before_P] == inputs.draft_P

        def deepen(_: int, counts_P: jax.Array) -> jax.Array:
            return first_P | (matches_P & counts_P[before_P])

        counts_P = lax.fori_loop(0, inputs.history_PK.shape[1], deepen, first_P)
        rows = before_P.shape[0]
        followed_P = (
            jnp.zeros(rows, bool).at[jnp.where(counts_P & ~first_P, before_P, rows)].set(True, mode="drop")
        )
        slot_P = jnp.where(counts_P, inputs.slot_P, spare)
        return slot_P, jnp.where(followed_P, spare, slot_P)

    slot_P, newest_P = lax.cond(inputs.any_draft, drafted, lambda: (inputs.slot_P, inputs.slot_P))
    return slot_P, token_P, newest_P


def _sample(
    logits_PV: jax.Array,
    inputs: SamplingInputs,
    state: SamplerState,
    draw_op: Draw | None,
    vocab: Vocabulary,
    typical: Typical | None,
) -> SamplerOutputs:
    finite_P = finite_rows(logits_PV, vocab.sum)
    edited_PV = lax.cond(any_edit(inputs), lambda: edit(logits_PV, inputs, state, vocab), lambda: logits_PV)
    greedy_P, healthy_P, max_P, max_PG = _choose_greedily(edited_PV, finite_P, vocab)
    law = untruncated(max_P, inputs)

    def randomly() -> tuple[jax.Array, Law]:
        if draw_op is not None:
            return _draw_by(draw_op, edited_PV, inputs)
        edited_PGJ = split_groups(edited_PV)
        kept_law, mass_PG = _truncated(edited_PGJ, max_PG, law, healthy_P, inputs, vocab)
        drawn_P = draw(edited_PGJ, kept_law, mass_PG, uniforms(inputs.key_P2, inputs.position_P), vocab)
        return jnp.where(inputs.temperature_P > 0, drawn_P, greedy_P), kept_law

    token_P, law = lax.cond(inputs.any_random, randomly, lambda: (greedy_P, law))
    if typical is not None:
        token_P = lax.cond(
            inputs.any_draft & inputs.any_random,
            lambda: lossy_tokens(token_P, edited_PV, law, inputs, typical, vocab),
            lambda: token_P,
        )
    token_P = jnp.where(healthy_P, token_P, 0)
    logprobs = sampled_logprobs(logits_PV, edited_PV, token_P, law, inputs, vocab)
    return SamplerOutputs(token_P=token_P, healthy_P=healthy_P, logprobs=logprobs)


def _draw_by(draw_op: Draw, edited_PV: jax.Array, inputs: SamplingInputs) -> tuple[jax.Array, Law]:
    """Tokens and processed law of all rows, greedy ones included, by a kernel."""
    draws = draw_op(
        edited_PV,
        uniforms(inputs.key_P2, inputs.position_P),
        inputs.temperature_P,
        inputs.top_k_P,
        inputs.top_p_P,
        inputs.min_p_P,
    )
    law = untruncated(draws.max_P, inputs)
    return draws.token_P, replace(law, threshold_P=draws.threshold_P)


def _choose_greedily(
    logits_PV: jax.Array, finite_P: jax.Array, vocab: Vocabulary
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Greedy token, health and largest logit of each row, and the maxima of this device's groups."""
    logits_PGJ = split_groups(logits_PV)
    max_PG = group_max(logits_PGJ)
    max_P, token_P = vocab.best(logits_PGJ, max_PG)
    healthy_P = finite_P & jnp.isfinite(max_P)
    return jnp.where(healthy_P, token_P, 0), healthy_P, max_P, max_PG


def _truncated(
    logits_PGJ: jax.Array,
    max_PG: jax.Array,
    law: Law,
    healthy_P: jax.Array,
    inputs: SamplingInputs,
    vocab: Vocabulary,
) -> tuple[Law, jax.Array]:
    """The processed law, and the sums of its weights over all groups."""
    mass_PG = vocab.all_groups(group_sum(weights(logits_PGJ, law)))

    def truncated() -> tuple[Law, jax.Array]:
        on_P = healthy_P & (inputs.temperature_P > 0)  # others would make the search run to its end
        kept = truncate(
            logits_PGJ,
            max_PG,
            law,
            mass_PG,
            jnp.where(on_P & (inputs.top_k_P < vocab.size), inputs.top_k_P, vocab.padded),
            jnp.where(on_P, inputs.top_p_P, 1.0),
            jnp.where(on_P, inputs.min_p_P, 0.0),
            vocab,
        )
        return kept, vocab.all_groups(group_sum(weights(logits_PGJ, kept)))

    return lax.cond(inputs.any_truncation, truncated, lambda: (law, mass_PG))
