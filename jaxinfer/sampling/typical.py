"""Medusa's typical acceptance (Cai et al. 2024, arXiv:2401.10774): the one rule that changes the law of the output.

A draft x counts where ``p(x) > min(epsilon, delta * exp(-H(p)))``, with p the processed law at its position and H its
entropy in nats: the more open the law, the less probable a draft may be. Of several drafts behind one token, the one
with the longest path of such drafts behind it counts. Where none does, the token is drawn as always. Greedy rows have
one typical token, the one that they get anyway.

Nothing calls this unless ``speculative.acceptance`` is ``typical``.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sampling.groups import group_sum, split_groups, total
from jaxinfer.sampling.inputs import SamplingInputs
from jaxinfer.sampling.law import Law, scores
from jaxinfer.sampling.vocabulary import Vocabulary


@dataclass(frozen=True)
class Typical:
    """How probable a draft has to be.

    Attributes:
        epsilon: in (0, 1], the highest bar.
        delta: positive, the bar of a law with one possible token.
    """

    epsilon: float
    delta: float


def lossy_tokens(
    token_P: jax.Array,
    edited_PV: jax.Array,
    law: Law,
    inputs: SamplingInputs,
    typical: Typical,
    vocab: Vocabulary,
) -> jax.Array:
    """The drawn tokens, int32 [P], with typical drafts in the place of those that were drawn before them.

    Args:
        token_P: what was drawn.
        edited_PV: edited logits; with ``law``, what the tokens were drawn from.
        vocab: the devices that share the logits.
    """
    row = jnp.arange(token_P.shape[0])
    before_P = jnp.maximum(inputs.before_P, 0)
    draft_P = jnp.maximum(inputs.draft_P, 0)
    score_PGJ = scores(split_groups(edited_PV), law)
    weight_PGJ = jnp.exp(score_PGJ)
    mass_P = total(vocab.all_groups(group_sum(weight_PGJ)))
    inner_PGJ = jnp.where(weight_PGJ > 0, weight_PGJ * score_PGJ, 0.0)
    inner_P = total(vocab.all_groups(group_sum(inner_PGJ)))
    entropy_P = jnp.log(mass_P) - inner_P / mass_P
    bar_P = jnp.minimum(typical.epsilon, typical.delta * jnp.exp(-entropy_P))
    counts_P = (inputs.before_P >= 0) & (inputs.temperature_P[before_P] > 0)
    weight_PV = weight_PGJ.reshape(len(row), -1)
    columns = weight_PV.shape[1]
    column_P = vocab.column(draft_P, columns)
    of_draft_P = weight_PV[before_P, jnp.minimum(column_P, columns - 1)]
    of_draft_P = vocab.sum(jnp.where(column_P < columns, of_draft_P, 0.0))
    counts_P &= of_draft_P > (bar_P * mass_P)[before_P]

    def longer(_: int, length_P: jax.Array) -> jax.Array:
        """One more than the longest accepted path behind each row, for the row before it."""
        return jnp.zeros_like(length_P).at[before_P].max(jnp.where(counts_P, 1 + length_P, 0))

    length_P = lax.fori_loop(0, inputs.history_PK.shape[1], longer, jnp.zeros_like(row))
    # Of equal paths the first one.
    best_P = counts_P & (1 + length_P == length_P[before_P])
    first_P = jnp.full_like(row, len(row)).at[before_P].min(jnp.where(best_P, row, len(row)))
    found_P = first_P < len(row)
    return jnp.where(found_P, draft_P[jnp.minimum(first_P, len(row) - 1)], token_P)
