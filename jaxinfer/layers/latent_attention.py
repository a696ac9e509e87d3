"""Multi-head latent attention over the paged cache of latents."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.kv_cache.layout import LayerKV
from jaxinfer.layers.linear import Linear
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import rotate
from jaxinfer.layers.shared_slots import MERGED_HEADS, merge_heads, own_slots, share_of
from jaxinfer.models.config import LatentConfig, TransformerConfig
from pallas_kernels.ops import Ops

NORM_EPS = 1e-6
"""Of the norms of the latents, whatever ``rms_norm_eps`` of the model is, as in ``transformers``."""


class HeadProjection(nnx.Module):
    """One matrix ``[m, r]`` for each head, held as ``[H * m, r]``; plain arrays, as the product is batched.

    Args:
        heads: logical axis of the heads, and how many this device has.
    """

    def __init__(self, heads: tuple[str, int], features: int, rank: int, param_dtype: jnp.dtype) -> None:
        axis, num_heads = heads
        self.shape = (num_heads, features, rank)
        self.weight = nnx.Param(
            jnp.zeros((num_heads * features, rank), param_dtype), logical_axes=(axis, None)
        )

    def into_latent(self, x_THm: jax.Array) -> jax.Array:
        """``[T, H, r]`` from ``[T, H, m]``."""
        return self._product("thm,hmr->thr", x_THm)

    def from_latent(self, x_THr: jax.Array) -> jax.Array:
        """``[T, H, m]`` from ``[T, H, r]``."""
        return self._product("thr,hmr->thm", x_THr)

    def _product(self, axes: str, x: jax.Array) -> jax.Array:
        weight_Hmr = self.weight[...].reshape(self.shape)
        return jnp.einsum(axes, x, weight_Hmr, preferred_element_type=jnp.float32).astype(x.dtype)


class LatentAttention(nnx.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) with absorbed up-projections.

    A head's query is multiplied by the key up-projection before the attention and the output by the value up-projection
    behind it, so that all heads attend to the latents themselves and only these are cached: r + d values per token
    instead of those of H keys and H values. It is so for every row of a step. A long prefill chunk would take fewer
    operations with the keys and values formed; it gives the same.

    Devices share the heads: all parameters with the axis "heads" are split by them, and the outputs added. The other
    parameters and the latents, with their cache, are the same on every device, unless devices share the slots of the
    cache: then what is behind the attention is split by "merged_heads".
    """

    def __init__(
        self,
        config: TransformerConfig,
        latent: LatentConfig,
        group: int,
        *,
        ops: Ops,
        param_dtype: jnp.dtype,
    ) -> None:
        D, H, bias = config.hidden_size, config.num_heads, config.qkv_bias
        self.latent = latent
        self.num_heads = ops.shards.local("heads", H)
        self.scale = config.query_scale
        self.group = group
        self.ops = ops

        def linear(inputs: int, outputs: int, axes: tuple[str | None, str | None], bias: bool) -> Linear:
            return Linear(inputs, outputs, axes=axes, bias=bias, ops=ops, param_dtype=param_dtype)

        queries = H * (latent.plain_dim + latent.rope_dim)
        rank = latent.query_rank
        # The latent of the queries, if there is one, that of keys and values, and the key that is rotated.
        self.down_widths = (rank or 0, latent.rank, latent.rope_dim)
        self.down = linear(D, sum(self.down_widths), (None, "embed"), bias)
        self.query_norm = None if rank is None else RMSNorm(rank, NORM_EPS, 0.0, None)
        self.query = linear(rank or D, queries, ("heads", "embed" if rank is None else None), False)
        self.norm = RMSNorm(latent.rank, NORM_EPS, 0.0, None)
        merged = (MERGED_HEADS, ops.shards.local(MERGED_HEADS, H))
        self.key_up = HeadProjection(("heads", self.num_heads), latent.plain_dim, latent.rank, param_dtype)
        self.value_up = HeadProjection(merged, latent.value_dim, latent.rank, param_dtype)
        self.output = linear(H * latent.value_dim, D, ("embed", MERGED_HEADS), config.output_bias)

    def __call__(
        self,
        x_TD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        kv: LayerKV,
        batch: ForwardBatch,
        split_rows: bool = False,
    ) -> tuple[jax.Array, LayerKV]:
        """Output ``[T, D]``, or this device's rows of it, and the cache of this layer with the latents and rotated keys
        of the step.
        """
        latent, T = self.latent, x_TD.shape[0]
        query_rank, rank, _ = self.down_widths
        query_TI, latent_Tr, key_Td = jnp.split(self.down(x_TD), (query_rank, query_rank + rank), axis=-1)
        q_TI = self.query(x_TD if self.query_norm is None else self.query_norm(query_TI))
        q_THh = q_TI.reshape(T, self.num_heads, latent.plain_dim + latent.rope_dim)
        q_plain_THm, q_rope_THd = jnp.split(q_THh, (latent.plain_dim,), axis=-1)
        latent_pool, rope_pool = self.ops.kv_write(
            kv.k_NKSh,
            kv.v_NKSh,
            self.norm(latent_Tr)[:, None],
            rotate(key_Td[:, None], rope, latent.interleaved),
            own_slots(self.ops.shards, batch.slots[self.group], kv.k_NKSh.shape[2]),
            k_scale_K=kv.k_scale_K,
            v_scale_K=kv.v_scale_K,
        )
        new_kv = LayerKV(latent_pool, rope_pool, kv.k_scale_K, kv.v_scale_K)
        queries = self.key_up.into_latent(q_plain_THm), rotate(q_rope_THd, rope, latent.interleaved)
        out_THm = self.value_up.from_latent(self._attend(*queries, new_kv, batch))
        return self.output(out_THm.reshape(T, -1), split_rows=split_rows), new_kv

    def _attend(
        self, q_latent_THr: jax.Array, q_rope_THd: jax.Array, kv: LayerKV, batch: ForwardBatch
    ) -> jax.Array:
        """In the dtype of the queries; of those of the heads that this device has merged, if devices share slots."""
        quantized = kv.k_NKSh.dtype.itemsize == 1
        args = (
            q_latent_THr,
            q_rope_THd,
            kv.k_NKSh,
            kv.v_NKSh,
            batch.block_tables[self.group],
            batch.query_start_Q,
            batch.context_len_R,
        )
        options = {
            "scale": self.scale,
            "latent_scale_K": kv.k_scale_K if quantized else None,
            "rope_scale_K": kv.v_scale_K if quantized else None,
            "ancestors_TU": batch.ancestors_TU,
        }
        share = share_of(self.ops.shards)
        if share is None:
            return self.ops.mla_attention(*args, **options)
        assert self.ops.mla_attention_share is not None, (
            "these ops were not chosen for devices that share slots"
        )
        out_THr, lse_TH = self.ops.mla_attention_share(*args, share=share, **options)
        return merge_heads(self.ops.shards, out_THr, lse_TH).astype(q_latent_THr.dtype)
