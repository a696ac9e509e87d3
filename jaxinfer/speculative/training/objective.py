"""What a head is trained for: the target's laws of the next tokens, on the head's own steps."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from jaxinfer.models.segments import Leaves, SegmentedModel
from jaxinfer.speculative.heads.head import DraftHead
from jaxinfer.speculative.training.batches import TrainBatch
from jaxinfer.speculative.training.dense_ops import dense_batch, empty_entries

STEP_DECAY = 0.8
"""Weight of a prediction relative to the one before it, as in Medusa and EAGLE-3."""
EAGLE_LAW_WEIGHT = 0.1
"""Weight of EAGLE-1's law loss beside its feature loss (arXiv:2401.15077)."""


@register_dataclass
@dataclass(frozen=True)
class Frozen:
    """Parameters of the target that training reads.

    Attributes:
        embed: of its embedding.
        head: of its output head, final norm first.
        draft: the same with the rows of the draft vocabulary only.
    """

    embed: Leaves
    head: Leaves
    draft: Leaves


@dataclass(frozen=True)
class Objective:
    """The differentiable forward of a head in training.

    Attributes:
        head: made with ``DENSE_OPS``.
        target: the model that the head drafts for.
        predictions: J tokens that are predicted behind each place.
    """

    head: DraftHead
    target: SegmentedModel
    predictions: int

    def predict(
        self, leaves: Leaves, frozen: Frozen, batch: TrainBatch
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Logits ``[B * n, Vd]`` of each prediction, and the hidden states behind them (none for Medusa)."""
        B, n, X = batch.feature_BnX.shape
        target_logits = partial(self.target.output, frozen.head)
        feature_TX = batch.feature_BnX.reshape(B * n, X).astype(jnp.float32)
        if self.head.forward is None:
            logits_TJV = self.head.logits(leaves, target_logits, feature_TX)
            return [logits_TJV[:, j] for j in range(self.predictions)], []
        kv = empty_entries(self.head.kv_specs, B * n, self.predictions, jnp.dtype(jnp.float32))
        x_TD = self.head.fuse(leaves, feature_TX)
        logits, hidden = [], []
        for j in range(self.predictions):
            step = dense_batch(_ahead(batch.token_ids_Bn, j), j)
            embedding_TD, _ = self.target.embed(frozen.embed, step)
            ropes, valid_T = self.head.rope_tables(step), jnp.ones((B * n,), bool)
            x_TD, kv = self.head.forward(
                leaves, x_TD, embedding_TD.astype(jnp.float32), ropes, kv, step, valid_T
            )
            logits.append(self.head.logits(leaves, target_logits, x_TD)[:, 0])
            hidden.append(x_TD)
        return logits, hidden

    def loss(self, leaves: Leaves, frozen: Frozen, batch: TrainBatch) -> tuple[jax.Array, "Scores"]:
        """The loss of a batch, and how good its predictions are."""
        logits, hidden = self.predict(leaves, frozen, batch)
        counted_JT = self._counted(batch)
        total = jnp.float32(0)
        for j, logits_TV in enumerate(logits):
            final_TD = _ahead(batch.final_BnD, j).reshape(len(logits_TV), -1).astype(jnp.float32)
            known_T = self._drafted(_ahead(batch.greedy_Bn, j).reshape(-1))[1]
            law_T = _cross_entropy(self.target.output(frozen.draft, final_TD), logits_TV)
            loss = _mean(law_T, counted_JT[j] & known_T)
            if self.head.method == "eagle":
                loss = EAGLE_LAW_WEIGHT * loss + _mean(_smooth_l1(hidden[j] - final_TD), counted_JT[j])
            total = total + STEP_DECAY**j * loss
        return total, _scores(*self._runs(logits, batch))

    def accepted(self, leaves: Leaves, frozen: Frozen, batch: TrainBatch) -> tuple[jax.Array, "Scores"]:
        """int32 ``[B, n]``: drafts that are accepted where token i is the newest one; and the counts of places."""
        logits, _ = self.predict(leaves, frozen, batch)
        judged_JT, run_JT = self._runs(logits, batch)
        accepted_Bn = run_JT.sum(0).astype(jnp.int32).reshape(batch.token_ids_Bn.shape)
        return accepted_Bn, _scores(judged_JT, run_JT)

    def _counted(self, batch: TrainBatch) -> jax.Array:
        """bool ``[J, T]``: places behind the prompt where position + j exists."""
        n = batch.token_ids_Bn.shape[1]
        place_n = jnp.arange(n)
        behind_Bn = place_n[None] >= batch.prompt_len_B[:, None]
        rows = [
            (behind_Bn & (place_n[None] + j < batch.length_B[:, None])).reshape(-1)
            for j in range(self.predictions)
        ]
        return jnp.stack(rows)

    def _drafted(self, token_T: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draft ids of target ids, and which of them the head can predict."""
        if self.head.vocab_map is None:
            return token_T, jnp.ones(token_T.shape, bool)
        vocab_map_V = jnp.asarray(self.head.vocab_map)
        index_T = jnp.clip(jnp.searchsorted(vocab_map_V, token_T), 0, len(self.head.vocab_map) - 1)
        return index_T, vocab_map_V[index_T] == token_T

    def _runs(self, logits: list[jax.Array], batch: TrainBatch) -> tuple[jax.Array, jax.Array]:
        """bool ``[J, T]`` twice: whether the text before prediction j is the target's greedy one, so that the step can
        be judged; and whether predictions 0..j are all what the target says."""
        judged = jnp.ones((batch.token_ids_Bn.size,), bool)
        run = judged
        judged_rows, run_rows = [], []
        for j, logits_TV in enumerate(logits):
            greedy_T = _ahead(batch.greedy_Bn, j).reshape(-1)
            index_T, known_T = self._drafted(greedy_T)
            run = run & judged & known_T & (jnp.argmax(logits_TV, axis=-1) == index_T)
            judged_rows.append(judged)
            run_rows.append(run)
            judged = judged & (_ahead(batch.token_ids_Bn, j + 1).reshape(-1) == greedy_T)
        counted_JT = self._counted(batch)
        return jnp.stack(judged_rows) & counted_JT, jnp.stack(run_rows) & counted_JT


@register_dataclass
@dataclass(frozen=True)
class Scores:
    """Counts of places per prediction: how many could be judged, and at how many it and all before it are right."""

    judged_J: jax.Array
    accepted_J: jax.Array

    def __add__(self, other: "Scores") -> "Scores":
        return Scores(self.judged_J + other.judged_J, self.accepted_J + other.accepted_J)

    def acceptance(self) -> list[float]:
        """Share of places at which prediction j and all before it are right."""
        judged, accepted = np.asarray(self.judged_J), np.asarray(self.accepted_J)
        return [float(a) / max(1, int(b)) for a, b in zip(accepted, judged)]


def _scores(judged_JT: jax.Array, run_JT: jax.Array) -> Scores:
    return Scores(judged_JT.sum(1), run_JT.sum(1))


def _ahead(values_BnX: jax.Array, steps: int) -> jax.Array:
    """Values of the position ``steps`` further on; 0 behind the end."""
    if steps == 0:
        return values_BnX
    return jnp.concatenate([values_BnX[:, steps:], jnp.zeros_like(values_BnX[:, :steps])], axis=1)


def _cross_entropy(target_TV: jax.Array, logits_TV: jax.Array) -> jax.Array:
    return -jnp.sum(jax.nn.softmax(target_TV) * jax.nn.log_softmax(logits_TV), axis=-1)


def _smooth_l1(difference_TD: jax.Array) -> jax.Array:
    size_TD = jnp.abs(difference_TD)
    return jnp.mean(jnp.where(size_TD < 1, 0.5 * size_TD**2, size_TD - 0.5), axis=-1)


def _mean(values_T: jax.Array, counted_T: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(counted_T, values_T, 0.0)) / jnp.maximum(1, counted_T.sum())
