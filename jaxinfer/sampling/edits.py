"""Edits of the logits before they become a law: logit bias, allowed tokens, penalties; in this order."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sampling.inputs import SamplerState, SamplingInputs
from jaxinfer.sampling.vocabulary import Vocabulary


def edit(
    logits_PV: jax.Array, inputs: SamplingInputs, state: SamplerState, vocab: Vocabulary | None = None
) -> jax.Array:
    """Edited logits, float32 [P, V]; a row without edits keeps its values.

    Args:
        vocab: where devices share the vocabulary; None: it is all here.
    """
    vocab = vocab or Vocabulary(logits_PV.shape[1])
    bias, mask, penalise = (partial(function, vocab) for function in (_add_bias, _mask, _penalise))
    logits_PV = lax.cond(inputs.any_bias, bias, lambda x_PV, _: x_PV, logits_PV, inputs)
    logits_PV = lax.cond(inputs.any_mask, mask, lambda x_PV, _: x_PV, logits_PV, inputs)
    return lax.cond(inputs.any_penalty, penalise, lambda x_PV, *_: x_PV, logits_PV, inputs, state)


def any_edit(inputs: SamplingInputs) -> jax.Array:
    """Whether ``edit`` changes anything, bool scalar."""
    return inputs.any_bias | inputs.any_mask | inputs.any_penalty


def _add_bias(vocab: Vocabulary, logits_PV: jax.Array, inputs: SamplingInputs) -> jax.Array:
    row_P1 = jnp.arange(logits_PV.shape[0])[:, None]
    column_PB = vocab.column(inputs.bias_ids_PB, logits_PV.shape[1])
    return logits_PV.at[row_P1, column_PB].add(inputs.bias_values_PB, mode="drop")


def _mask(vocab: Vocabulary, logits_PV: jax.Array, inputs: SamplingInputs) -> jax.Array:
    rows, columns = logits_PV.shape
    allowed_PX = vocab.words(inputs.allowed_PX, columns)
    bits_PX32 = (allowed_PX[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed_PV = bits_PX32.reshape(rows, -1)[:, :columns] != 0
    return jnp.where(allowed_PV, logits_PV, -jnp.inf)


def _penalise(
    vocab: Vocabulary, logits_PV: jax.Array, inputs: SamplingInputs, state: SamplerState
) -> jax.Array:
    """Repetition penalty (CTRL, arXiv:1909.05858) over prompt and output; frequency and presence over
    the output.
    """
    count_PV = _add_history(vocab, state.output_counts_WV[inputs.slot_P], inputs)
    seen_PV = state.prompt_seen_WV[inputs.slot_P] | (count_PV > 0)
    repetition_P1 = inputs.repetition_penalty_P[:, None]
    weaker_PV = jnp.where(logits_PV > 0, logits_PV / repetition_P1, logits_PV * repetition_P1)
    logits_PV = jnp.where(seen_PV, weaker_PV, logits_PV)
    logits_PV -= inputs.frequency_penalty_P[:, None] * count_PV
    return logits_PV - inputs.presence_penalty_P[:, None] * (count_PV > 0)


def _add_history(vocab: Vocabulary, count_PV: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """Counts the drafts before a position as output, for it is sampled as if they were."""
    if inputs.history_PK.shape[1] == 0:
        return count_PV
    row_P1 = jnp.arange(count_PV.shape[0])[:, None]
    column_PK = vocab.column(inputs.history_PK, count_PV.shape[1])
    return count_PV.at[row_P1, column_PK].add(1, mode="drop")
