"""Copies of blocks and slots on the device, in pieces of the size of their programs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.kv_cache.layout import KVCache, kv_partition
from jaxinfer.kv_cache.manager import BlockCopy, SlotMove
from jaxinfer.layers.shared_slots import SLOTS, own_slots
from pallas_kernels.ops import Shards
from sharding.layout import ONE_DEVICE, WHOLE, Layout


@dataclass(frozen=True)
class PoolCopies:
    """The jitted copies of a cache, which they donate: (source, target) pairs [G, C, 2] of each group in all its
    layers. They read all sources before they write.

    Attributes:
        blocks: pairs of block ids.
        slots: pairs of ``block * S + offset``.
    """

    blocks: Callable[[KVCache, np.ndarray], KVCache]
    slots: Callable[[KVCache, np.ndarray], KVCache]

    @classmethod
    def make(cls, groups: tuple[int, ...], layout: Layout = ONE_DEVICE) -> Self:
        """Args:
        groups: KV group of each layer.
        layout: where the pools are.
        """
        cache = (kv_partition(layout.rules),) * len(groups)

        def over_devices(copy: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., KVCache]:
            function = layout.spread(partial(_over_layers, groups, copy), (cache, WHOLE), cache)
            return jax.jit(function, donate_argnums=(0,))

        return cls(over_devices(_copy_blocks), over_devices(partial(_move_slots, layout.rules)))


def copy_blocks(
    pools: PoolCopies, kv_cache: KVCache, copies: tuple[BlockCopy, ...], plan: CompilePlan
) -> KVCache:
    """Copies in order, as many per call as the program has pairs; padding copies block 0 onto itself."""
    size = plan.copied_blocks
    for start in range(0, len(copies), size):
        pairs_GC2 = np.zeros((plan.num_groups, size, 2), np.int32)
        for i, copy in enumerate(copies[start : start + size]):
            pairs_GC2[copy.group, i] = copy.source, copy.target
        kv_cache = pools.blocks(kv_cache, pairs_GC2)
    return kv_cache


def move_slots(pools: PoolCopies, kv_cache: KVCache, moves: Sequence[SlotMove], plan: CompilePlan) -> KVCache:
    """Moves in order. A later piece reads nothing that an earlier one wrote: targets lie before later sources.

    Padding moves slot 0, of block 0, onto itself.
    """
    by_group = [[move for move in moves if move.group == group] for group in range(plan.num_groups)]
    size = plan.moved_slots
    for start in range(0, max(map(len, by_group)), size):
        pairs_GC2 = np.zeros((plan.num_groups, size, 2), np.int32)
        for group, of_group in enumerate(by_group):
            for i, move in enumerate(of_group[start : start + size]):
                pairs_GC2[group, i] = move.source, move.target
        kv_cache = pools.slots(kv_cache, pairs_GC2)
    return kv_cache


def _over_layers(
    groups: tuple[int, ...],
    copy: Callable[[jax.Array, jax.Array], jax.Array],
    kv_cache: KVCache,
    pairs_GC2: jax.Array,
) -> KVCache:
    return tuple(
        replace(kv, k_NKSh=copy(kv.k_NKSh, pairs_GC2[g]), v_NKSh=copy(kv.v_NKSh, pairs_GC2[g]))
        for kv, g in zip(kv_cache, groups, strict=True)
    )


def _copy_blocks(pool_NKSh: jax.Array, pairs_C2: jax.Array) -> jax.Array:
    rows_CKSh = jnp.take(pool_NKSh, pairs_C2[:, 0], axis=0, mode="clip")

    def write(i: jax.Array, pool: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice_in_dim(rows_CKSh, i, 1)
        return jax.lax.dynamic_update_slice_in_dim(pool, row, pairs_C2[i, 1], 0)

    return jax.lax.fori_loop(0, pairs_C2.shape[0], write, pool_NKSh)


def _move_slots(shards: Shards, pool_NKSh: jax.Array, pairs_C2: jax.Array) -> jax.Array:
    """Slots of a sequence may be on several devices: each gets all that are moved, and writes its own."""
    S, count = pool_NKSh.shape[2], shards.size(SLOTS)
    holder_C = pairs_C2[:, 0] % (count * S) // S
    (block_C, to_C), (offset_C, at_C) = (x.T for x in jnp.divmod(own_slots(shards, pairs_C2, S), S))
    moved_CKh = pool_NKSh[block_C, :, offset_C]
    if count > 1:
        moved_CKhN = shards.join(moved_CKh[..., None], SLOTS)
        moved_CKh = jnp.take_along_axis(moved_CKhN, holder_C[:, None, None, None], axis=-1)[..., 0]
    return pool_NKSh.at[to_C, :, at_C].set(moved_CKh)
