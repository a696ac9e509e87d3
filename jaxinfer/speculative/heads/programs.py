"""The jitted functions of a draft head beside its target. Pure functions over flat tuples of arrays."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.batch.packing import Packing
from jaxinfer.kv_cache.layout import KVCache
from jaxinfer.models.decoder import valid_tokens
from jaxinfer.models.segments import Leaves, SegmentedModel
from jaxinfer.speculative.heads.head import DraftHead


@dataclass(frozen=True)
class HeadLeaves:
    """Parameters of the head, and those of the target's embedding and output."""

    head: Leaves
    embed: Leaves
    output: Leaves


@dataclass(frozen=True)
class HeadFunctions:
    """Buffers have one size X for all T, so that only the functions that are given T are compiled for each T.

    Attributes:
        features: (x_XD, leaves, hidden_XD, captured_XF, T) -> x_XD, whose first T rows are what the head reads of a
            step of the target. Donates the first.
        keep: (feature_WD, x_XD, slot_R, index_R) -> feature_WD with rows of x in the given slots. Donates the first.
        entries: (kv, hidden_XD, leaves, feature_WD, x_XD, newest_W, packed, before_T, slot_T, T) -> (kv, hidden_XD):
            one pass over a batch, whose tokens are entries. ``before_T`` is the index in x of each entry's feature, -1
            for that of its slot. Donates the first two.
        logits: (leaves, hidden_XD, index_P) -> float32 [P, V] over the target's vocabulary; Medusa: [P, num_heads, V].
    """

    features: Callable[..., jax.Array]
    keep: Callable[..., jax.Array]
    entries: Callable[..., tuple[KVCache, jax.Array]]
    logits: Callable[..., jax.Array]

    @classmethod
    def make(cls, head: DraftHead, target: SegmentedModel, plan: CompilePlan) -> Self:
        return cls(
            features=jax.jit(partial(_features, head, target), static_argnums=4, donate_argnums=0),
            keep=jax.jit(_keep, donate_argnums=0),
            entries=jax.jit(partial(_entries, head, target, plan), static_argnums=9, donate_argnums=(0, 1)),
            logits=jax.jit(partial(_logits, head, target)),
        )


def capture(buffer_XF: jax.Array, x_TD: jax.Array, column: int) -> jax.Array:
    """Writes hidden states into a buffer of features; ``column`` is static and the buffer donated."""
    return jax.lax.dynamic_update_slice(buffer_XF, x_TD.astype(buffer_XF.dtype), (0, column))


def _features(
    head: DraftHead,
    target: SegmentedModel,
    x_XD: jax.Array,
    leaves: HeadLeaves,
    hidden_XD: jax.Array,
    captured_XF: jax.Array,
    T: int,
) -> jax.Array:
    final = not head.feature_layers
    features_TF = target.final_norm(leaves.output, hidden_XD[:T]) if final else captured_XF[:T]
    return _store(x_XD, head.fuse(leaves.head, features_TF))


def _store(buffer_XD: jax.Array, x_TD: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer_XD, x_TD.astype(buffer_XD.dtype), (0, 0))


def _keep(feature_WD: jax.Array, x_XD: jax.Array, slot_R: jax.Array, index_R: jax.Array) -> jax.Array:
    return feature_WD.at[slot_R].set(x_XD[index_R])


def _entries(
    head: DraftHead,
    target: SegmentedModel,
    plan: CompilePlan,
    kv: KVCache,
    out_XD: jax.Array,
    leaves: HeadLeaves,
    feature_WD: jax.Array,
    x_XD: jax.Array,
    newest_W: jax.Array,
    packed: jax.Array,
    before_T: jax.Array,
    slot_T: jax.Array,
    token_bucket: int,
) -> tuple[KVCache, jax.Array]:
    batch = resolved(plan, newest_W, packed, token_bucket)
    first_T1 = (before_T < 0)[:, None]
    input_TD = jnp.where(first_T1, feature_WD[slot_T], x_XD[jnp.maximum(before_T, 0)])
    if head.embed is None:
        embedding_TD, _ = target.embed(leaves.embed, batch)
    else:
        embedding_TD = head.embed(leaves.head, batch.token_ids_T)
    assert head.forward is not None
    hidden_TD, kv = head.forward(
        leaves.head, input_TD, embedding_TD, head.rope_tables(batch), kv, batch, valid_tokens(batch)
    )
    return kv, _store(out_XD, hidden_TD)


def resolved(plan: CompilePlan, newest_W: jax.Array, packed: jax.Array, token_bucket: int) -> ForwardBatch:
    """The batch, with the newest token of a slot where the host did not know it."""
    batch = Packing.make(plan, token_bucket).unpack(packed)
    ids_T = batch.token_ids_T
    return replace(batch, token_ids_T=jnp.where(ids_T < 0, newest_W[jnp.maximum(-ids_T - 1, 0)], ids_T))


def _logits(
    head: DraftHead, target: SegmentedModel, leaves: HeadLeaves, hidden_XD: jax.Array, index_P: jax.Array
) -> jax.Array:
    logits_PKV = head.logits(leaves.head, partial(target.output, leaves.output), hidden_XD[index_P])
    if head.vocab_map is not None:
        full_PKV = jnp.full((*logits_PKV.shape[:2], target.config.vocab_size), -jnp.inf)
        logits_PKV = full_PKV.at[..., np.asarray(head.vocab_map)].set(logits_PKV)
    return logits_PKV if head.forward is None else logits_PKV[:, 0]


jax.tree_util.register_dataclass(HeadLeaves)
