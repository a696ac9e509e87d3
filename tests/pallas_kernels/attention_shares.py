"""Attention over shares of a context, put together again: an op with the contract of attention over the whole."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from pallas_kernels.ragged_paged_attention.shares import Share, merge


@dataclass(frozen=True)
class OverShares:
    """Runs an op for each of several devices, with its part of the pools, and merges what they return.

    Attributes:
        op: ``ragged_paged_attention_share`` or ``mla_attention_share`` of a backend.
        count: devices; they divide the slots of a block.
        num_queries: leading arguments that are queries; two pools follow.
    """

    op: Callable[..., tuple[jax.Array, jax.Array]]
    count: int
    num_queries: int = 1

    def __call__(self, *args: jax.Array, **options: object) -> jax.Array:
        def one(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.op(*self.arguments(args, index), share=Share(index, self.count), **options)

        out_NTHh, lse_NTH = jax.lax.map(one, jax.numpy.arange(self.count))
        return merge(out_NTHh, lse_NTH).astype(args[0].dtype)

    def arguments(self, args: tuple[jax.Array, ...], index: jax.Array | int) -> tuple[jax.Array, ...]:
        """Those of one device."""
        first = self.num_queries
        size = args[first].shape[2] // self.count

        def part(pool: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(pool, index * size, size, axis=2)

        return (*args[:first], *(part(pool) for pool in args[first : first + 2]), *args[first + 2 :])
