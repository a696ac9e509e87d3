"""The vocabulary of a row of logits, on one device or shared by several.

A device's share is a range of whole groups of tokens. What is said of a group (its maximum, the sum of its weights) is
joined over the devices; candidates of each device are merged; single groups and entries are fetched from the device
that has them. Logits themselves are never joined. Sums over the groups have the same terms in the same order as on one
device, so the results are the same bits.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.layers.linear import VOCAB_UNIT
from jaxinfer.sampling.groups import GROUP, first_argmax, largest, take_group, top_tokens
from pallas_kernels.ops import ALONE, Shards

assert VOCAB_UNIT % GROUP == 0, "a group of tokens must lie on one device"


@dataclass(frozen=True)
class Vocabulary:
    """V tokens and the devices that share their logits. Hashable.

    Attributes:
        size: V.
        shards: of the logical axis "vocab".
    """

    size: int
    shards: Shards = ALONE

    @property
    def shared(self) -> bool:
        return self.shards.size("vocab") > 1

    @property
    def padded(self) -> int:
        """Tokens of all groups together."""
        return -(-self.size // GROUP) * GROUP

    def column(self, token_ids: jax.Array, columns: int) -> jax.Array:
        """Where a device with so many columns has these tokens; ``columns``, which is out of range, if it has not."""
        if not self.shared:
            return token_ids
        at = token_ids - self.shards.index("vocab") * columns
        return jnp.where((at >= 0) & (at < columns), at, columns)

    def words(self, mask_PX: jax.Array, columns: int) -> jax.Array:
        """The words of packed masks that speak of this device's columns."""
        if not self.shared:
            return mask_PX
        count = columns // 32
        missing = count * self.shards.size("vocab") - mask_PX.shape[1]
        mask_PX = jnp.pad(mask_PX, ((0, 0), (0, missing)))
        return lax.dynamic_slice_in_dim(mask_PX, self.shards.index("vocab") * count, count, axis=1)

    def all_groups(self, x_PG: jax.Array) -> jax.Array:
        """What all devices say of their groups, in the order of the groups."""
        return self.shards.join(x_PG, "vocab")[:, : self.padded // GROUP] if self.shared else x_PG

    def sum(self, x_P: jax.Array) -> jax.Array:
        """The sum over the devices."""
        return self.shards.sum(x_P, "vocab")

    def smallest(self, x_P: jax.Array) -> jax.Array:
        """The smallest over the devices."""
        return self.shards.join(x_P[:, None], "vocab").min(-1) if self.shared else x_P

    def group(self, x_PGJ: jax.Array, group_P: jax.Array) -> jax.Array:
        """One group of each row, [P, J], by its number among all groups."""
        if not self.shared:
            return take_group(x_PGJ, group_P)
        groups = x_PGJ.shape[1]
        at_P = group_P - self.shards.index("vocab") * groups
        x_PJ = take_group(x_PGJ, jnp.clip(at_P, 0, groups - 1))
        return self.sum(jnp.where(((at_P >= 0) & (at_P < groups))[:, None], x_PJ, 0))

    def at(self, x_PV: jax.Array, token_ids_PX: jax.Array) -> jax.Array:
        """Entries of tokens, [P, X]."""
        if not self.shared:
            return jnp.take_along_axis(x_PV, token_ids_PX, axis=1)
        columns = x_PV.shape[1]
        column_PX = self.column(token_ids_PX, columns)
        x_PX = jnp.take_along_axis(x_PV, jnp.minimum(column_PX, columns - 1), axis=1)
        return self.sum(jnp.where(column_PX < columns, x_PX, 0))

    def best(self, x_PGJ: jax.Array, max_PG: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The largest entry of each row, and its token, int32; ties to the lowest id."""
        value_P, token_P = max_PG.max(-1), first_argmax(x_PGJ, max_PG)
        if not self.shared:
            return value_P, token_P
        token_P = token_P + self._first_token(x_PGJ)
        value_PX = self.shards.join(value_P[:, None], "vocab")
        token_PX = self.shards.join(token_P[:, None], "vocab")
        winner_P1 = jnp.argmax(value_PX, axis=-1)[:, None]
        return value_PX.max(-1), jnp.take_along_axis(token_PX, winner_P1, axis=1)[:, 0]

    def top(self, x_PGJ: jax.Array, max_PG: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """The ``count`` largest entries of each row and their tokens; see ``top_tokens``."""
        value_PX, token_PX = top_tokens(x_PGJ, max_PG, count)
        if not self.shared:
            return value_PX, token_PX
        value_PX = self.shards.join(value_PX, "vocab")
        token_PX = self.shards.join(token_PX + self._first_token(x_PGJ), "vocab")
        # Devices come in the order of ids, and equal values keep their order: ties go to the lowest id.
        value_PX, place_PX = largest(value_PX, count)
        return value_PX, jnp.take_along_axis(token_PX, place_PX, axis=1)

    def _first_token(self, x_PGJ: jax.Array) -> jax.Array | int:
        return self.shards.index("vocab") * x_PGJ.shape[1] * GROUP
