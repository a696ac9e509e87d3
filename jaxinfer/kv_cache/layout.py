"""Device layout of the KV cache: which arrays each layer keeps, and how layers share block tables."""

from dataclasses import dataclass

import jax
from jax.tree_util import register_dataclass

from sharding.axes import AxisRules


@register_dataclass
@dataclass(frozen=True)
class LayerKV:
    """Paged K and V of one layer, ``[N, K, S, h]``, and the scales of a quantized cache (float32 ``[K]``).

    With latent attention the latent is in place of K, and the rotated key, of another width, in place of V.
    """

    k_NKSh: jax.Array
    v_NKSh: jax.Array
    k_scale_K: jax.Array
    v_scale_K: jax.Array


KVCache = tuple[LayerKV, ...]


def kv_partition(rules: AxisRules) -> LayerKV:
    """How a layer's arrays are spread: ``PartitionSpec``s in their places."""
    pool, scale = rules.spec((None, "kv_heads", "slots")), rules.spec(("kv_heads",))
    return LayerKV(pool, pool, scale, scale)  # type: ignore[arg-type]


@dataclass(frozen=True)
class LayerKVSpec:
    """What one layer stores per token, and how far back it looks.

    Attributes:
        num_kv_heads: K.
        head_dim: h.
        window: number of last tokens that the layer attends to, itself included; None for all.
        second_dim: width of the second array, where it is not h.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None
    second_dim: int | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of a head in the two arrays."""
        return self.head_dim, self.head_dim if self.second_dim is None else self.second_dim


def group_layers(specs: tuple[LayerKVSpec, ...]) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """Groups layers that can share a block table: those with the same window.

    Returns:
        The window of each group (the group without a window first), and the group index of each layer.
    """
    windows = sorted({s.window for s in specs}, key=lambda w: (w is not None, w or 0))
    return tuple(windows), tuple(windows.index(s.window) for s in specs)
