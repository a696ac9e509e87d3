"""Log-probabilities of chosen, most likely and named tokens."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sampling.groups import (
    finite_rows,
    group_max,
    group_sum,
    row_count,
    split_groups,
    total,
)
from jaxinfer.sampling.inputs import LogprobOutputs, SamplingInputs
from jaxinfer.sampling.law import Law, scores
from jaxinfer.sampling.limits import MAX_LOGPROBS
from jaxinfer.sampling.vocabulary import Vocabulary


def score(
    logits_PV: jax.Array, target_P: jax.Array, named_ids_PX: jax.Array, vocab: Vocabulary | None = None
) -> LogprobOutputs:
    """Raw log-probabilities, for example of prompt tokens: the log-softmax of the logits in float32.

    Args:
        logits_PV: of the model; any float type.
        target_P: int32, the token at each position.
        named_ids_PX: int32, further tokens that are asked for.
        vocab: where devices share the vocabulary; None: it is all here.

    Returns:
        Of each position. Rows whose logits hold NaN or +inf have NaN everywhere; -inf is the value of a token
        whose logit is -inf.
    """
    logits_PV = logits_PV.astype(jnp.float32)
    vocab = vocab or Vocabulary(logits_PV.shape[1])
    outputs = _score(logits_PV, target_P, named_ids_PX, jnp.bool_(True), vocab)
    healthy_P = finite_rows(logits_PV, vocab.sum)

    def poison(x_PX: jax.Array) -> jax.Array:
        shape = (-1,) + (1,) * (x_PX.ndim - 1)
        return jnp.where(healthy_P.reshape(shape), x_PX, jnp.nan)

    return LogprobOutputs(
        chosen_P=poison(outputs.chosen_P),
        rank_P=outputs.rank_P,
        top_ids_PX=outputs.top_ids_PX,
        top_values_PX=poison(outputs.top_values_PX),
        named_values_PX=poison(outputs.named_values_PX),
    )


def sampled_logprobs(
    logits_PV: jax.Array,
    edited_PV: jax.Array,
    token_P: jax.Array,
    law: Law,
    inputs: SamplingInputs,
    vocab: Vocabulary,
) -> LogprobOutputs:
    """Log-probabilities at the sampled positions, of the raw or the processed law, whichever a row asks for.

    The processed law gives -inf to tokens that the row could not sample. All zeros unless ``any_logprobs``.

    Args:
        logits_PV, edited_PV: logits of the model and after the edits, float32.
        token_P: int32, the sampled tokens.
        law: processed law of each row, relative to the edited logits.
        inputs, vocab: as for ``sample``.
    """

    def some() -> LogprobOutputs:
        # Not behind a conditional: XLA would copy the logits in front of it, for greedy rows too.
        processed_P1 = inputs.processed_logprobs_P[:, None]
        scores_PV = jnp.where(processed_P1, scores(edited_PV, law), logits_PV)
        return _score(scores_PV, token_P, inputs.named_ids_PX, inputs.any_named, vocab)

    return lax.cond(inputs.any_logprobs, some, lambda: no_logprobs(inputs))


def no_logprobs(inputs: SamplingInputs) -> LogprobOutputs:
    """Zeros in the place of log-probabilities that no row asks for."""
    rows, named = inputs.named_ids_PX.shape
    return LogprobOutputs(
        chosen_P=jnp.zeros(rows, jnp.float32),
        rank_P=jnp.zeros(rows, jnp.int32),
        top_ids_PX=jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
        top_values_PX=jnp.zeros((rows, MAX_LOGPROBS), jnp.float32),
        named_values_PX=jnp.zeros((rows, named), jnp.float32),
    )


def _score(
    scores_PV: jax.Array,
    target_P: jax.Array,
    named_ids_PX: jax.Array,
    any_named: jax.Array,
    vocab: Vocabulary,
) -> LogprobOutputs:
    """Log-softmax of float32 scores; finite rows only."""
    scores_PGJ = split_groups(scores_PV)
    max_PG = group_max(scores_PGJ)
    top_values_PX, top_ids_PX = vocab.top(scores_PGJ, max_PG, MAX_LOGPROBS)
    max_P = vocab.all_groups(max_PG).max(-1)
    weight_PGJ = jnp.exp(scores_PGJ - max_P[:, None, None])
    log_mass_P = max_P + jnp.log(total(vocab.all_groups(group_sum(weight_PGJ))))
    target_score_P = vocab.at(scores_PV, target_P[:, None])[:, 0]

    def named() -> jax.Array:
        return vocab.at(scores_PV, named_ids_PX) - log_mass_P[:, None]

    return LogprobOutputs(
        chosen_P=target_score_P - log_mass_P,
        rank_P=1 + vocab.sum(row_count(scores_PGJ > target_score_P[:, None, None])),
        top_ids_PX=top_ids_PX,
        top_values_PX=top_values_PX - log_mass_P[:, None],
        named_values_PX=lax.cond(any_named, named, lambda: jnp.zeros(named_ids_PX.shape, jnp.float32)),
    )
