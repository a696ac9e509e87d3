"""Which rows go to the devices of which experts, and where they lie when they arrive.

N devices have R rows each, T = N R in all. A device sends a row at most once to each device. What it sends to device d
is block d of its ``[T, D]``, rows that are wanted first, in their order; block s of what it receives is from device s.
So there is room for whatever is chosen.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Blocks:
    """N blocks of R rows for, or from, the devices.

    Attributes:
        row_T: which row lies here: of a device's own R, or of all T.
        counts_T: whether it counts; in each block the first ones do.
        count_N: rows of each block that count, int32.
    """

    row_T: jax.Array
    counts_T: jax.Array
    count_N: jax.Array


@dataclass(frozen=True)
class Routes:
    """``wanted_SRN``: bool, whether row r of device s goes to device n."""

    wanted_SRN: jax.Array

    @classmethod
    def of(cls, device_TX: jax.Array, devices: int) -> "Routes":
        """Args:
        device_TX: where the chosen experts of each row are; others than 0 to N - 1 are nowhere.
        """
        wanted_TN = (device_TX[:, :, None] == jnp.arange(devices)).any(axis=1)
        return cls(wanted_TN.reshape(devices, -1, devices))

    def sent(self, me: jax.Array | int) -> Blocks:
        """What device ``me`` sends; rows of its own."""
        return _blocks(self.wanted_SRN[me].T)

    def received(self, me: jax.Array | int) -> Blocks:
        """What device ``me`` receives; rows of all."""
        blocks, R = _blocks(self.wanted_SRN[:, :, me]), self.wanted_SRN.shape[1]
        first_T = R * (jnp.arange(blocks.row_T.shape[0]) // R)
        return Blocks(first_T + blocks.row_T, blocks.counts_T, blocks.count_N)

    def gather(self, y_TD: jax.Array, me: jax.Array | int, most: int) -> jax.Array:
        """The sum ``[R, D]`` of what came back for each row of device ``me``.

        Args:
            y_TD: in the blocks of ``sent``.
            most: no row goes to more devices.
        """
        _, R, N = self.wanted_SRN.shape
        wanted_RN = self.wanted_SRN[me]
        rank_RN = jnp.cumsum(wanted_RN, axis=0) - 1
        sent_RX, device_RX = jax.lax.top_k(wanted_RN.astype(jnp.int32), min(most, N))
        place_RX = R * device_RX + jnp.take_along_axis(rank_RN, device_RX, axis=1)
        y_RXD = jnp.where((sent_RX > 0)[..., None], y_TD[jnp.maximum(place_RX, 0)].astype(jnp.float32), 0.0)
        return jnp.sum(y_RXD, axis=1).astype(y_TD.dtype)


def _blocks(wanted_NR: jax.Array) -> Blocks:
    R = wanted_NR.shape[1]
    count_N = jnp.sum(wanted_NR, axis=1, dtype=jnp.int32)
    row_NR = jnp.argsort(~wanted_NR, axis=1, stable=True)
    return Blocks(row_NR.reshape(-1), (jnp.arange(R) < count_N[:, None]).reshape(-1), count_N)
