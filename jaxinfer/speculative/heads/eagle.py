"""EAGLE-1/2: autoregression on the target's features (Li et al. 2024, arXiv:2401.15077; EAGLE-2: arXiv:2406.16858).

An entry joins feature and embedding by a linear map and passes Llama layers, the first without an input norm. The
output imitates the target's hidden state after the final norm, so the target's output head turns it into logits.
EAGLE-2 has the same head; it differs in how trees are drafted (see ``speculative.trees``).
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.kv_cache.layout import KVCache
from jaxinfer.layers.linear import Embedding, Linear
from jaxinfer.layers.rope import rope_tables
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.decoder import DecoderLayer, kv_specs
from jaxinfer.models.segments import Leaves, ModulePart, Ropes, abstract_part, shapes_of
from jaxinfer.speculative.heads.config import EagleConfig
from jaxinfer.speculative.heads.head import PREFIX, DraftHead, TargetLogits
from jaxinfer.speculative.heads.layers import EntryLayer, Rope, run_layers
from pallas_kernels.ops import Ops


class Eagle(nnx.Module):
    """The parameters of an EAGLE-1/2 head.

    Args:
        group: KV group of its layers.
    """

    def __init__(self, config: EagleConfig, group: int, *, ops: Ops, param_dtype: jnp.dtype) -> None:
        layer, D = config.layer, config.layer.hidden_size
        self.embed = (
            Embedding(layer.vocab_size, D, ops=ops, param_dtype=param_dtype) if config.own_embedding else None
        )
        self.fc = Linear(
            2 * D, D, axes=("embed", None), bias=config.fc_bias, ops=ops, param_dtype=param_dtype
        )
        self.first = EntryLayer(layer, D, group, ops=ops, param_dtype=param_dtype)
        self.rest = nnx.List(
            [
                DecoderLayer(layer, i, group, ops=ops, param_dtype=param_dtype)
                for i in range(1, layer.num_layers)
            ]
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
        joined_TD = self.fc(jnp.concatenate([embedding_TD.astype(x_TD.dtype), x_TD], axis=-1))
        return run_layers(self.first, self.rest, joined_TD, joined_TD, rope, kv, batch, valid_T)


def eagle_head(
    config: EagleConfig,
    ops: Ops,
    dtype: jnp.dtype,
    *,
    param_dtype: jnp.dtype,
    max_model_len: int,
    group: int = 0,
) -> DraftHead:
    """Describes an EAGLE-1/2 head.

    Args:
        dtype: of embeddings that the head looks up itself; ``forward`` computes in the dtype of its input.
        max_model_len: longest sequence to be served; fixes the length-dependent rope types.
        group: KV group of the head's layers in the batches it gets.
    """
    params: dict[str, nnx.Param] = {}
    module = nnx.eval_shape(lambda: Eagle(config, group, ops=ops, param_dtype=param_dtype))
    part, _ = abstract_part(module, PREFIX, params)
    return DraftHead(
        method="eagle",
        shapes=shapes_of(params),
        feature_layers=(),
        kv_specs=kv_specs(config.layer),
        embed=partial(_embed, part, jnp.dtype(dtype)) if config.own_embedding else None,
        fuse=_as_it_is,
        rope_tables=partial(rope_of_layers, config.layer, max_model_len),
        forward=partial(_forward, part),
        logits=_logits,
        num_heads=1,
        draft_vocab_size=config.draft_vocab_size,
        vocab_map=None,
    )


def rope_of_layers(config: TransformerConfig, max_model_len: int, batch: ForwardBatch) -> Ropes:
    """The one table of a head's layers."""
    return (rope_tables(batch.positions_T, config.ropes[0], max_model_len),)


def _as_it_is(leaves: Leaves, features_TD: jax.Array) -> jax.Array:
    return features_TD


def _embed(part: ModulePart, dtype: jnp.dtype, leaves: Leaves, token_ids_T: jax.Array) -> jax.Array:
    head = part.merge(leaves)
    assert isinstance(head, Eagle)
    assert head.embed is not None
    return head.embed(token_ids_T, 1.0, dtype)


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
    head = part.merge(leaves)
    assert isinstance(head, Eagle)
    return head(x_TD, embedding_TD, ropes[0], kv, batch, valid_T)


def _logits(leaves: Leaves, target_logits: TargetLogits, hidden_PD: jax.Array) -> jax.Array:
    return target_logits(hidden_PD)[:, None]
