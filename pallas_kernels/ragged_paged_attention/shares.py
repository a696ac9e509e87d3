"""A context whose slots several devices share: which of them each holds, and how what they make of them is merged.

Of every block of N * S slots, device d of N holds the slots from d * S to (d + 1) * S, in a block of S slots with the
same id. Whole blocks could be dealt to the devices instead, but cut ones need nothing of the host: ids, tables, prefix
hits, forks and preemption are those of one device with blocks of N * S slots, and copies of blocks stay on each device.
All devices hold as much of a sequence, up to S slots, and its sums do not depend on which blocks it has. The price is
blocks that are N times as large for the same S.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Share:
    """Which slots of a context are here.

    Attributes:
        index: of this device, int32 or a number.
        count: devices that share the context.
    """

    index: jax.Array | int
    count: int

    def positions(self, slot: jax.Array, block_size: int) -> jax.Array:
        """Positions in the sequence of slots, which are counted along the table of blocks of ``block_size``."""
        block, offset = slot // block_size, slot % block_size
        return (block * self.count + self.index) * block_size + offset

    def slots_before(self, position: jax.Array, block_size: int) -> jax.Array:
        """How many slots have positions below this one."""
        whole, rest = position // (self.count * block_size), position % (self.count * block_size)
        return whole * block_size + jnp.clip(rest - self.index * block_size, 0, block_size)

    def own_slots(self, slot: jax.Array, block_size: int) -> jax.Array:
        """Slots ``block * N * S + offset`` of all devices as slots ``block * S + offset`` of this one; those that
        others hold are slot 0, which belongs to padding."""
        block, offset = slot // (self.count * block_size), slot % (self.count * block_size)
        mine = offset // block_size == self.index
        return jnp.where(mine, block * block_size + offset % block_size, 0)


def merge(out_NTHh: jax.Array, lse_NTH: jax.Array) -> jax.Array:
    """Attention over N shares of a context as attention over all of it: float32 ``[T, H, h]``.

    Outputs are weighted by what the softmax over a share leaves out, its sum of exponentials, as between the splits of
    Flash-Decoding (Dao et al. 2023) and the blocks of Ring Attention (Liu et al. 2023, arXiv:2310.01889).

    Args:
        out_NTHh, lse_NTH: float32, results of ``ragged_paged_attention_share``. A share of which a query sees nothing
            has -inf and any output; if all have, the result is 0.
    """
    top_TH = jnp.max(lse_NTH, axis=0)
    top_TH = jnp.where(jnp.isneginf(top_TH), 0.0, top_TH)
    weight_NTH = jnp.exp(lse_NTH - top_TH)
    sum_TH = jnp.sum(weight_NTH, axis=0)
    out_THh = jnp.sum(jnp.where(weight_NTH[..., None] == 0, 0.0, out_NTHh * weight_NTH[..., None]), axis=0)
    return out_THh / jnp.where(sum_TH == 0, 1.0, sum_TH)[..., None]
