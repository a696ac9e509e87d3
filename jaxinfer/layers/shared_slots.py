"""Attention where several devices share the slots of the KV cache (``parallel.context``).

Each device writes the keys and values that fall into its slots, computes the attention of all its heads over these, and
gets from the others what they have of some of its heads, in one all-to-all; what it passes on are these heads. So MLP
and output projection are shared by the same devices that share the context in between, as in Helix Parallelism (Bhatia
et al. 2025, arXiv:2507.07120).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.ops import Shards
from pallas_kernels.ragged_paged_attention.shares import Share, merge

SLOTS = "slots"
"""Logical axis: the slots of a block."""
MERGED_HEADS = "merged_heads"
"""Logical axis: query heads of whose attention over shares of a context a device makes that over all of it."""


def share_of(shards: Shards) -> Share | None:
    """This device's share of every context; None if it is the whole."""
    count = shards.size(SLOTS)
    return None if count == 1 else Share(shards.index(SLOTS), count)


def own_slots(shards: Shards, slot_T: jax.Array, block_size: int) -> jax.Array:
    """Where this device writes tokens; slots of other devices become slot 0 of padding.

    Args:
        slot_T: int32 ``block * S + offset``, S slots of all devices together.
        block_size: slots of a block on this device.
    """
    share = share_of(shards)
    return slot_T if share is None else share.own_slots(slot_T, block_size)


def merge_heads(shards: Shards, out_THh: jax.Array, lse_TH: jax.Array) -> jax.Array:
    """Attention over the whole context from that over the shares, of this device's part of the heads: float32."""
    packed_THe = jnp.concatenate([out_THh, lse_TH[..., None]], axis=-1)
    packed_NTHe = shards.deal(packed_THe, SLOTS, 1)
    return merge(packed_NTHe[..., :-1], packed_NTHe[..., -1])
