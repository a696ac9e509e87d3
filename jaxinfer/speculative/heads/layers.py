"""The layers that draft heads are made of."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.kv_cache.layout import KVCache, LayerKV
from jaxinfer.layers.attention import Attention
from jaxinfer.layers.linear import Linear
from jaxinfer.layers.mlp import MLP
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.decoder import DecoderLayer
from pallas_kernels.ops import Ops

Rope = tuple[jax.Array, jax.Array]


class EntryLayer(nnx.Module):
    """A Llama layer whose attention reads something else than the residual.

    Args:
        in_features: width of what the attention reads.
        group: KV group of the layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        in_features: int,
        group: int,
        *,
        ops: Ops,
        param_dtype: jnp.dtype,
    ) -> None:
        self.attention = Attention(
            config, None, group, ops=ops, param_dtype=param_dtype, in_features=in_features
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset, "embed")
        self.mlp = MLP(
            config.hidden_size,
            config.intermediate_size,
            config.activation,
            bias=config.mlp_bias,
            ops=ops,
            param_dtype=param_dtype,
        )

    def __call__(
        self, inputs_TI: jax.Array, residual_TD: jax.Array, rope: Rope, kv: LayerKV, batch: ForwardBatch
    ) -> tuple[jax.Array, LayerKV]:
        """Output ``[T, D]`` and the cache with the K and V of the step."""
        y_TD, kv = self.attention(inputs_TI, rope, kv, batch)
        x_TD = residual_TD + y_TD
        return x_TD + self.mlp(self.mlp_norm(x_TD)), kv


def run_layers(
    first: EntryLayer,
    rest: Iterable[DecoderLayer],
    inputs_TI: jax.Array,
    residual_TD: jax.Array,
    rope: Rope,
    kv: KVCache,
    batch: ForwardBatch,
    valid_T: jax.Array,
) -> tuple[jax.Array, KVCache]:
    """Output ``[T, D]`` of all layers of a head, and their cache."""
    y_TD, new = first(inputs_TI, residual_TD, rope, kv[0], batch)
    cache = [new]
    for layer, layer_kv in zip(rest, kv[1:], strict=True):
        y_TD, new, _ = layer(y_TD, rope, layer_kv, batch, valid_T)
        cache.append(new)
    return y_TD, tuple(cache)


class ResidualBlock(nnx.Module):
    """``x + silu(weight @ x + bias)``, the block of a Medusa head."""

    def __init__(self, hidden_size: int, *, bias: bool, ops: Ops, param_dtype: jnp.dtype) -> None:
        self.linear = Linear(
            hidden_size, hidden_size, axes=(None, "embed"), bias=bias, ops=ops, param_dtype=param_dtype
        )

    def __call__(self, x_PD: jax.Array) -> jax.Array:
        return x_PD + jax.nn.silu(self.linear(x_PD))
