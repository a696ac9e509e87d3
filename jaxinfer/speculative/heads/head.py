"""What the engine knows of a trained draft head, whatever its kind."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import jax
import numpy as np

from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.kv_cache.layout import KVCache, LayerKVSpec
from jaxinfer.models.segments import Leaves, Ropes

Method = Literal["medusa", "eagle", "eagle3"]
METHODS: tuple[Method, ...] = ("medusa", "eagle", "eagle3")

PREFIX = "draft"
"""First part of all parameter paths of a head, which so differ from the target's."""

TargetLogits = Callable[[jax.Array], jax.Array]
"""The target's output head without its final norm: ``[P, D]`` -> float32 ``[P, V]``."""


class HeadForward(Protocol):
    """One pass of an autoregressive head over a ragged batch; see ``DraftHead.forward``."""

    def __call__(
        self,
        leaves: Leaves,
        x_TD: jax.Array,
        embedding_TD: jax.Array,
        ropes: Ropes,
        kv: KVCache,
        batch: ForwardBatch,
        valid_T: jax.Array,
    ) -> tuple[jax.Array, KVCache]: ...


@dataclass(frozen=True)
class DraftHead:
    """A draft head without its weights: static parts, and parameters by path. Nothing is allocated.

    **Which token goes with which feature.** The features of the target at position p are its hidden states there, a
    function of the tokens 0..p. *Entry* i of an autoregressive head (slot i of its KV) combines the feature of
    position i - 1 with the embedding of token i; entry 0 has zeros for a feature. So an entry depends on no later
    token, and blocks of equal prefixes can be shared. The output at entry i predicts token i + 1, and stands for the
    feature of position i when entry i + 1 is computed before the target has run there.

    Published heads pair feature and token in the same way, but have no entry 0 and give entry 1 the rotary position
    0. Rotary embedding sees distances only, so what differs is that here each entry can also attend to entry 0; see
    docs/speculation.md for why it stays.

    Medusa heads read the feature of position p, and head k predicts token p + 2 + k (token p + 1 is the target's own).

    Attributes:
        shapes: dtype and shape of every parameter by path; its order is the order of ``Leaves``.
        feature_layers: () for the target's final hidden state *after* the final norm. Else the features are the
            *inputs* of these target layers, concatenated in this order (``num_layers`` stands for the output of the
            last layer).
        kv_specs: what each layer of the head keeps per entry; () for Medusa.
        embed: (leaves, token_ids_T) -> embedding_TD, for a head with an embedding of its own; None: the target's, as
            the target's first layer gets it.
        fuse: (leaves, features_TX) -> x_TD: from the target's features to what ``forward`` takes. Outputs of
            ``forward`` are not fused again.
        rope_tables: (batch) -> the tables of ``forward``, from the positions of the batch.
        forward: (leaves, x_TD, embedding_TD, ropes, kv, batch, valid_T) -> (hidden_TD, kv); None for Medusa. The
            batch's positions, slots and tables are those of the entries, its KV group is the one the head was made for.
        logits: (leaves, target_logits, hidden_PD) -> float32 ``[P, num_heads, Vd]``, from outputs of ``forward``, or
            for Medusa from features.
        num_heads: tokens that one row of ``logits`` predicts, one behind the other; 1 for autoregressive heads.
        vocab_map: int32 ``[Vd]``, target ids of the draft ids, increasing; None: the ids are the target's.
    """

    method: Method
    shapes: dict[str, jax.ShapeDtypeStruct]
    feature_layers: tuple[int, ...]
    kv_specs: tuple[LayerKVSpec, ...]
    embed: Callable[[Leaves, jax.Array], jax.Array] | None
    fuse: Callable[[Leaves, jax.Array], jax.Array]
    rope_tables: Callable[[ForwardBatch], Ropes]
    forward: HeadForward | None
    logits: Callable[[Leaves, TargetLogits, jax.Array], jax.Array]
    num_heads: int
    draft_vocab_size: int
    vocab_map: np.ndarray | None

    @property
    def paths(self) -> tuple[str, ...]:
        """Parameter paths in the order of the leaves."""
        return tuple(self.shapes)
