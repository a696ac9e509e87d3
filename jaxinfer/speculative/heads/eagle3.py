"""EAGLE-3: features of three depths, and training on its own predictions (Li et al. 2025, arXiv:2503.01840).

The target's low, middle and high hidden states are fused by a linear map. The first layer's attention reads the
normalised embedding beside the normalised feature; a norm and an output head of the head's own, often over a part of
the vocabulary, give the logits. What is fed back when drafting further is the output before that norm.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.kv_cache.layout import KVCache
from jaxinfer.layers.linear import Embedding, Linear
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.models.decoder import DecoderLayer, kv_specs
from jaxinfer.models.segments import Leaves, ModulePart, Ropes, abstract_part, shapes_of
from jaxinfer.speculative.heads.config import EagleConfig
from jaxinfer.speculative.heads.eagle import rope_of_layers
from jaxinfer.speculative.heads.head import PREFIX, DraftHead, TargetLogits
from jaxinfer.speculative.heads.layers import EntryLayer, Rope, run_layers
from pallas_kernels.ops import Ops


class Eagle3(nnx.Module):
    """The parameters of an EAGLE-3 head.

    Args:
        group: KV group of its layers.
    """

    def __init__(self, config: EagleConfig, group: int, *, ops: Ops, param_dtype: jnp.dtype) -> None:
        layer, D = config.layer, config.layer.hidden_size
        norm = (D, layer.norm_eps, layer.norm_offset, "embed")
        self.norm_before_residual = config.norm_before_residual
        self.embed = (
            Embedding(layer.vocab_size, D, ops=ops, param_dtype=param_dtype) if config.own_embedding else None
        )
        features = len(config.feature_layers) * config.feature_size
        self.fc = Linear(features, D, axes=("embed", None), bias=False, ops=ops, param_dtype=param_dtype)
        self.embedding_norm = RMSNorm(*norm)
        self.feature_norm = RMSNorm(*norm)
        self.first = EntryLayer(layer, 2 * D, group, ops=ops, param_dtype=param_dtype)
        self.rest = nnx.List(
            [
                DecoderLayer(layer, i, group, ops=ops, param_dtype=param_dtype)
                for i in range(1, layer.num_layers)
            ]
        )
        self.norm = RMSNorm(*norm)
        self.lm_head = Linear(
            D, config.draft_vocab_size, axes=("vocab", "embed"), bias=False, ops=ops, param_dtype=param_dtype
        )

    def __call__(
        self,
        x_TD: jax.Array,
        embedding_TD: jax.Array,
        rope: Rope,
        kv: KVCache,
        batch: ForwardBatch,
        valid_T: jax.Array,
    ) -> tuple[jax.Array, KVCache]:
        feature_TD = self.feature_norm(x_TD)
        embedding_TD = self.embedding_norm(embedding_TD.astype(x_TD.dtype))
        residual_TD = feature_TD if self.norm_before_residual else x_TD
        inputs_TI = jnp.concatenate([embedding_TD, feature_TD], axis=-1)
        return run_layers(self.first, self.rest, inputs_TI, residual_TD, rope, kv, batch, valid_T)


def eagle3_head(
    config: EagleConfig,
    ops: Ops,
    dtype: jnp.dtype,
    *,
    param_dtype: jnp.dtype,
    max_model_len: int,
    group: int = 0,
    vocab_map: np.ndarray | None = None,
) -> DraftHead:
    """Describes an EAGLE-3 head.

    Args:
        dtype: of embeddings that the head looks up itself; ``forward`` computes in the dtype of its input.
        max_model_len: longest sequence to be served; fixes the length-dependent rope types.
        group: KV group of the head's layers in the batches it gets.
        vocab_map: as ``DraftHead.vocab_map``.
    """
    assert (vocab_map is None) == (config.draft_vocab_size == config.layer.vocab_size)
    params: dict[str, nnx.Param] = {}
    module = nnx.eval_shape(lambda: Eagle3(config, group, ops=ops, param_dtype=param_dtype))
    part, _ = abstract_part(module, PREFIX, params)
    return DraftHead(
        method="eagle3",
        shapes=shapes_of(params),
        feature_layers=config.feature_layers,
        kv_specs=kv_specs(config.layer),
        embed=partial(_embed, part, jnp.dtype(dtype)) if config.own_embedding else None,
        fuse=partial(_fuse, part),
        rope_tables=partial(rope_of_layers, config.layer, max_model_len),
        forward=partial(_forward, part),
        logits=partial(_logits, part),
        num_heads=1,
        draft_vocab_size=config.draft_vocab_size,
        vocab_map=vocab_map,
    )


def _merge(part: ModulePart, leaves: Leaves) -> Eagle3:
    head = part.merge(leaves)
    assert isinstance(head, Eagle3)
    return head


def _embed(part: ModulePart, dtype: jnp.dtype, leaves: Leaves, token_ids_T: jax.Array) -> jax.Array:
    head = _merge(part, leaves)
    assert head.embed is not None
    return head.embed(token_ids_T, 1.0, dtype)


def _fuse(part: ModulePart, leaves: Leaves, features_TX: jax.Array) -> jax.Array:
    return _merge(part, leaves).fc(features_TX)


def _forward(
    part: ModulePart,
    leaves: Leaves,
    x_TD: jax.Array,
    embedding_TD: jax.Array,
    ropes: Ropes,
    kv: KVCache,
    batch: ForwardBatch,
    valid_T: jax.Array,
) -> tuple[jax.Array, KVCache]:
    return _merge(part, leaves)(x_TD, embedding_TD, ropes[0], kv, batch, valid_T)


def _logits(part: ModulePart, leaves: Leaves, target_logits: TargetLogits, hidden_PD: jax.Array) -> jax.Array:
    head = _merge(part, leaves)
    return head.lm_head(head.norm(hidden_PD), out_dtype=jnp.dtype(jnp.float32))[:, None]
