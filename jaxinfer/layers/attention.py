"""Self-attention over the paged KV cache."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.kv_cache.layout import LayerKV
from jaxinfer.layers.linear import Linear
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.shared_slots import MERGED_HEADS, merge_heads, own_slots, share_of
from jaxinfer.models.config import TransformerConfig
from pallas_kernels.ops import Ops
from sharding.axes import Part


def kv_heads(num_kv_heads: int, width: int = 1) -> Part:
    """KV heads as (a part of) a dimension: where there are fewer than devices, several devices hold the same one."""
    return Part("kv_heads", num_kv_heads, width, repeat=True)


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al., 2023), with q, k and v in one projection.

    Devices share the query heads, each with the KV heads that its queries need, or the slots of the cache, or both.

    Args:
        in_features: width of the input, where it is not the model's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        window: int | None,
        group: int,
        *,
        ops: Ops,
        param_dtype: jnp.dtype,
        in_features: int | None = None,
    ) -> None:
        H, K, h = config.num_heads, config.num_kv_heads, config.head_dim
        self.heads = (ops.shards.local("heads", H), ops.shards.local((kv_heads(K),), K), h)
        self.scale = config.query_scale
        self.soft_cap = config.attention_soft_cap
        self.window = window
        self.group = group
        self.ops = ops
        self.qkv = Linear(
            in_features or config.hidden_size,
            (H + 2 * K) * h,
            axes=((Part("heads", H, h), kv_heads(K, h), kv_heads(K, h)), "embed"),
            bias=config.qkv_bias,
            ops=ops,
            param_dtype=param_dtype,
        )
        self.output = Linear(
            H * h,
            config.hidden_size,
            axes=("embed", MERGED_HEADS),
            bias=config.output_bias,
            ops=ops,
            param_dtype=param_dtype,
        )
        ops.shards.local(MERGED_HEADS, H)  # whole heads; the projection would be content with parts
        self.norm_eps = config.norm_eps
        norm = (config.norm_eps, config.norm_offset, None)
        self.q_norm = RMSNorm(h, *norm) if config.qk_norm else None
        self.k_norm = RMSNorm(h, *norm) if config.qk_norm else None

    def __call__(
        self,
        x_TD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        kv: LayerKV,
        batch: ForwardBatch,
        split_rows: bool = False,
    ) -> tuple[jax.Array, LayerKV]:
        """Output ``[T, D]``, or this device's rows of it, and the cache of this layer with the K and V of the step."""
        T = x_TD.shape[0]
        H, K, h = self.heads
        q_THh, k_NKSh, v_NKSh = self.ops.rope_kv_write(
            self.qkv(x_TD).reshape(T, H + 2 * K, h),
            *rope,
            kv.k_NKSh,
            kv.v_NKSh,
            own_slots(self.ops.shards, batch.slots[self.group], kv.k_NKSh.shape[2]),
            k_scale_K=kv.k_scale_K,
            v_scale_K=kv.v_scale_K,
            q_norm_h=None if self.q_norm is None else self.q_norm.factor(),
            k_norm_h=None if self.k_norm is None else self.k_norm.factor(),
            norm_eps=self.norm_eps,
        )
        new_kv = LayerKV(k_NKSh, v_NKSh, kv.k_scale_K, kv.v_scale_K)
        out_THh = self._attend(q_THh, new_kv, batch)
        return self.output(out_THh.reshape(T, -1), split_rows=split_rows), new_kv

    def _attend(self, q_THh: jax.Array, kv: LayerKV, batch: ForwardBatch) -> jax.Array:
        """In the dtype of the queries; of those of the heads that this device has merged, if devices share slots."""
        quantized = kv.k_NKSh.dtype.itemsize == 1
        args = (
            q_THh,
            kv.k_NKSh,
            kv.v_NKSh,
            batch.block_tables[self.group],
            batch.query_start_Q,
            batch.context_len_R,
        )
        options = {
            "scale": self.scale,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "k_scale_K": kv.k_scale_K if quantized else None,
            "v_scale_K": kv.v_scale_K if quantized else None,
            "ancestors_TU": batch.ancestors_TU,
        }
        share = share_of(self.ops.shards)
        if share is None:
            return self.ops.attention(*args, **options)
        assert self.ops.attention_share is not None, "these ops were not chosen for devices that share slots"
        out_THh, lse_TH = self.ops.attention_share(*args, share=share, **options)
        return merge_heads(self.ops.shards, out_THh, lse_TH).astype(q_THh.dtype)
