"""The decoder-only transformer that all families share; a ``TransformerConfig`` says what differs."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.kv_cache.layout import KVCache, LayerKV, LayerKVSpec, group_layers
from jaxinfer.layers.attention import Attention
from jaxinfer.layers.latent_attention import LatentAttention
from jaxinfer.layers.linear import Embedding, Linear, vocab_axis
from jaxinfer.layers.mlp import MLP
from jaxinfer.layers.moe import SparseMLP
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import rope_tables
from jaxinfer.models.config import RopeConfig, TransformerConfig
from pallas_kernels.ops import Ops


def kv_specs(config: TransformerConfig) -> tuple[LayerKVSpec, ...]:
    """What each layer keeps in the KV cache; the same as ``DecoderLM.kv_specs``, without a model."""
    if config.latent is not None:
        shape = (1, config.latent.rank, None, config.latent.rope_dim)
        return (LayerKVSpec(*shape),) * config.num_layers
    return tuple(LayerKVSpec(config.num_kv_heads, config.head_dim, window) for window in config.windows)


def rope_tables_of(
    ropes: Iterable[RopeConfig], batch: ForwardBatch, max_model_len: int
) -> dict[RopeConfig, tuple[jax.Array, jax.Array]]:
    """Cosines and sines of a step, once per distinct rope of the model, not per layer."""
    # Not a set: its order differs between processes, and with it the program the compilation cache looks for.
    distinct = dict.fromkeys(ropes)
    return {rope: rope_tables(batch.positions_T, rope, max_model_len) for rope in distinct}


def valid_tokens(batch: ForwardBatch) -> jax.Array:
    """bool ``[T]``: which tokens are not padding."""
    return jnp.arange(batch.token_ids_T.shape[0]) < batch.query_start_Q[-1]


def head_logits(config: TransformerConfig, output: Embedding | Linear, hidden_PD: jax.Array) -> jax.Array:
    """Float32 logits ``[P, V]`` of hidden states after the final norm, soft cap included.

    Devices that share the vocabulary have the logits of their tokens; what fills their shares up has -inf.

    Args:
        output: the head, or the embedding it is tied to.
    """
    if isinstance(output, Embedding):
        logits_PV = output.logits(hidden_PD)
    else:
        logits_PV = output(hidden_PD, out_dtype=jnp.dtype(jnp.float32))
    cap, shards, V = config.final_soft_cap, output.ops.shards, logits_PV.shape[1]
    logits_PV = logits_PV if cap is None else cap * jnp.tanh(logits_PV / cap)
    if shards.size("vocab") == 1:
        return logits_PV
    token_V = shards.index("vocab") * V + jnp.arange(V)
    return jnp.where(token_V < config.vocab_size, logits_PV, -jnp.inf)


class DecoderLayer(nnx.Module):
    """Attention and MLP with norms before, and for some families also after."""

    def __init__(
        self, config: TransformerConfig, layer: int, group: int, *, ops: Ops, param_dtype: jnp.dtype
    ) -> None:
        D = config.hidden_size
        norm = (D, config.norm_eps, config.norm_offset, "embed")
        self.ops = ops
        self.input_norm = RMSNorm(*norm)
        self.attention: Attention | LatentAttention
        if config.latent is not None:
            self.attention = LatentAttention(config, config.latent, group, ops=ops, param_dtype=param_dtype)
        else:
            self.attention = Attention(config, config.windows[layer], group, ops=ops, param_dtype=param_dtype)
        self.mlp_norm = RMSNorm(*norm)
        self.mlp: MLP | SparseMLP
        if config.moe is not None and config.moe.sparse_layers[layer]:
            self.mlp = SparseMLP(
                config.moe, D, config.activation, bias=config.mlp_bias, ops=ops, param_dtype=param_dtype
            )
        else:
            self.mlp = MLP(
                D,
                config.intermediate_size,
                config.activation,
                bias=config.mlp_bias,
                ops=ops,
                param_dtype=param_dtype,
            )
        self.attention_post_norm = RMSNorm(*norm) if config.post_norms else None
        self.mlp_post_norm = RMSNorm(*norm) if config.post_norms else None

    def __call__(
        self,
        x_TD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        kv: LayerKV,
        batch: ForwardBatch,
        valid_T: jax.Array,
    ) -> tuple[jax.Array, LayerKV, tuple[jax.Array, ...]]:
        """Output ``[T, D]``, the cache of this layer with the K and V of the step, and if there are experts, the rows
        that each of them got, int32 ``[E]``."""
        shards = self.ops.shards
        split = isinstance(self.mlp, SparseMLP) and shards.splits(x_TD.shape[0])
        h_TD, _ = self.input_norm.with_sum(self.ops, x_TD)
        y_TD, kv = self.attention(h_TD, rope, kv, batch, split_rows=split)
        if split:  # from here to the end of the layer, T are this device's rows
            x_TD, valid_T = shards.own_rows(x_TD), shards.own_rows(valid_T)
        if self.attention_post_norm is not None:
            y_TD = self.attention_post_norm(y_TD)
        h_TD, x_TD = self.mlp_norm.with_sum(self.ops, x_TD, y_TD)
        rows: tuple[jax.Array, ...] = ()
        if isinstance(self.mlp, SparseMLP):
            y_TD, rows_E = self.mlp.exchanged(h_TD, valid_T) if split else self.mlp(h_TD, valid_T)
            rows = (rows_E,)
        else:
            y_TD = self.mlp(h_TD)
        x_TD = x_TD + (y_TD if self.mlp_post_norm is None else self.mlp_post_norm(y_TD))
        return shards.join_rows(x_TD) if split else x_TD, kv, rows


class DecoderLM(nnx.Module):
    """Decoder-only language model.

    Args:
        ops: the op implementations; they must be hashable, because they are static data of the compiled step.
        dtype: of the activations. Norms, rotations, softmax, routing and logits are computed in float32.
        param_dtype: of the weights (norm and router weights are float32).
        max_model_len: longest sequence the engine serves; fixes the length-dependent rope types.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ops: Ops,
        *,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        max_model_len: int,
    ) -> None:
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.max_model_len = max_model_len
        _, groups = group_layers(kv_specs(config))
        self.embed = Embedding(config.vocab_size, config.hidden_size, ops=ops, param_dtype=param_dtype)
        self.layers = nnx.List(
            [
                DecoderLayer(config, layer, groups[layer], ops=ops, param_dtype=param_dtype)
                for layer in range(config.num_layers)
            ]
        )
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset, "embed")
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(
                config.hidden_size,
                config.vocab_size,
                axes=(vocab_axis(config.vocab_size), "embed"),
                bias=False,
                ops=ops,
                param_dtype=param_dtype,
            )
        )

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Runs the tokens of a step.

        Args:
            batch: token ids are resolved (non-negative).
            kv_cache: one entry per layer.

        Returns:
            The hidden states after the final norm, ``[T, D]``, and the cache with the K and V of the step.
        """
        config = self.config
        tables = rope_tables_of(config.ropes, batch, self.max_model_len)
        valid_T = valid_tokens(batch)
        x_TD = self.embed(batch.token_ids_T, config.embedding_scale, self.dtype)
        new_cache = []
        for layer, rope, kv in zip(self.layers, config.ropes, kv_cache, strict=True):
            x_TD, kv, _ = layer(x_TD, tables[rope], kv, batch, valid_T)
            new_cache.append(kv)
        return self.final_norm(x_TD), tuple(new_cache)

    def logits(self, hidden_PD: jax.Array) -> jax.Array:
        """Float32 logits ``[P, V]`` of hidden states after the final norm, soft cap included."""
        return head_logits(self.config, self.embed if self.lm_head is None else self.lm_head, hidden_PD)

    def kv_specs(self) -> tuple[LayerKVSpec, ...]:
        """What each layer keeps in the KV cache."""
        return kv_specs(self.config)
