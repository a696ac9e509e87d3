"""Logical axes of arrays, and the rules that spread them over the axes of a mesh.

A model names the axes of its parameters by what they count ("heads", "mlp", "vocab"); one ``AxisRules`` says over which
mesh axes each of them is spread. Inside a program that runs on all devices of a mesh (``Layout.spread``) the same value
says how large a device's share is and adds or joins shares, so no model names a mesh axis.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from sharding.rows import RowExchange, exchange


@dataclass(frozen=True)
class Part:
    """Consecutive entries of a dimension that belong to one logical axis.

    Attributes:
        name: of the logical axis.
        count: items along it.
        width: entries of an item, which stay together.
        repeat: where there are more devices than items, several devices hold the same item.
        unit: shares are multiples of so many items; what is missing to the last ones is zero. 0: the count has to be
            divided evenly.
    """

    name: str
    count: int
    width: int = 1
    repeat: bool = False
    unit: int = 0


Axis = str | None | tuple[Part, ...]
"""A dimension: all of one logical axis, of none, or the concatenation of parts."""


@dataclass(frozen=True)
class AxisRules:
    """Which mesh axes each logical axis is spread over. Hashable; serves as the ``shards`` of ``Ops``.

    Attributes:
        mesh_axes: mesh axes by logical axis, the outermost first; a logical axis that is absent is whole everywhere.
        sizes: devices along each mesh axis.
        row_exchange: None: the devices that share the experts all compute with all rows.
    """

    mesh_axes: tuple[tuple[str, tuple[str, ...]], ...]
    sizes: tuple[tuple[str, int], ...]
    row_exchange: RowExchange | None = None

    def over(self, name: str | None) -> tuple[str, ...]:
        """The mesh axes that a logical axis is really spread over."""
        sizes = dict(self.sizes)
        return tuple(axis for axis in dict(self.mesh_axes).get(name or "", ()) if sizes[axis] > 1)

    def size(self, name: str | None) -> int:
        """Number of shares of a logical axis."""
        sizes = dict(self.sizes)
        return int(np.prod([sizes[axis] for axis in self.over(name)], dtype=np.int64))

    def local(self, axis: Axis, size: int) -> int:
        """Entries of a dimension of ``size`` entries that one device holds.

        Raises:
            ValueError: the entries cannot be spread over so many devices; names both numbers.
        """
        parts = _parts(axis, size)
        return size if parts is None else sum(self._share(part) * part.width for part in parts)

    def spec(self, axes: tuple[Axis, ...]) -> PartitionSpec:
        """How an array with these dimensions lies on the mesh."""
        names = [self._mesh_axes_of(axis) for axis in axes]
        return PartitionSpec(*(name[0] if len(name) == 1 else name or None for name in names))

    def block(self, array: np.ndarray, axes: tuple[Axis, ...], position: Mapping[str, int]) -> np.ndarray:
        """What the device at a position of the mesh holds of an array.

        Args:
            position: index along each mesh axis.
        """
        for dim, axis in enumerate(axes):
            parts = _parts(axis, array.shape[dim])
            if parts is not None and self._mesh_axes_of(axis):
                array = self._take(array, dim, parts, position)
        return array

    def items(self, part: Part, position: Mapping[str, int]) -> range:
        """The items of a part that the device at a position holds; fewer than its share where items are missing."""
        share, shard = self._share(part), self._shard(part.name, position)
        if part.repeat and self.size(part.name) > part.count:
            shard = shard * part.count // self.size(part.name)
        return range(min(shard * share, part.count), min((shard + 1) * share, part.count))

    # ---- inside a program

    def index(self, name: str | None) -> jax.Array | int:
        """Which share of a logical axis this device holds."""
        over = self.over(name)
        return lax.axis_index(over) if over else 0

    def sum(self, x: jax.Array, *names: str | None, split_rows: bool = False) -> jax.Array:
        """The sum of what the devices hold that share these logical axes.

        Args:
            split_rows: each gets only its own rows, see ``splits``.
        """
        over = tuple(dict.fromkeys(axis for name in names for axis in self.over(name)))
        if split_rows:
            axis = self._row_axis
            assert axis in over, "the devices that split the rows hold the same sum"
            x = lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)
            over = tuple(name for name in over if name != axis)
        return lax.psum(x, over) if over else x

    def join(self, x: jax.Array, name: str | None) -> jax.Array:
        """The shares of a logical axis, one behind the other along the last dimension."""
        over = self.over(name)
        return lax.all_gather(x, over, axis=x.ndim - 1, tiled=True) if over else x

    def deal(self, x: jax.Array, name: str, dim: int) -> jax.Array:
        """Each device of the N that share a logical axis gets one N-th of ``dim`` from all of them.

        Returns:
            ``[N, ...]``: this device's part of ``dim``, as each of the devices has it, in their order.
        """
        over = self.over(name)
        if not over:
            return x[None]
        N = self.size(name)
        cut = x.reshape(*x.shape[:dim], N, x.shape[dim] // N, *x.shape[dim + 1 :])
        return lax.all_to_all(cut, over, split_axis=dim, concat_axis=0)

    # ---- inside a program: rows

    def splits(self, rows: int) -> bool:
        """Whether the devices that share the experts split the rows of sparse layers, in a program of so many rows."""
        devices, how = self.size("experts"), self.row_exchange
        return how is not None and devices > 1 and rows >= how.least_rows and rows % devices == 0

    def own_rows(self, x: jax.Array) -> jax.Array:
        """This device's rows of what all have."""
        rows = x.shape[0] // self.size("experts")
        return lax.dynamic_slice_in_dim(x, rows * self.index("experts"), rows)

    def join_rows(self, x: jax.Array) -> jax.Array:
        """The rows of all devices."""
        return lax.all_gather(x, self._row_axis, axis=0, tiled=True)

    def exchange_rows(self, x: jax.Array, send_N: jax.Array, receive_N: jax.Array) -> jax.Array:
        """Sends blocks of rows to the devices that share the experts; see ``rows.exchange``."""
        assert self.row_exchange is not None, "rows are not split"
        return exchange(x, send_N, receive_N, self._row_axis, ragged=self.row_exchange.ragged)

    @property
    def _row_axis(self) -> str:
        (axis,) = self.over("experts")
        return axis

    # ---- parts

    def _share(self, part: Part) -> int:
        """Items of a part on one device."""
        devices = self.size(part.name)
        if part.unit and devices > 1:
            units = -(-part.count // part.unit)
            return -(-units // devices) * part.unit
        if part.count % devices == 0:
            return part.count // devices
        if part.repeat and devices % part.count == 0:
            return 1
        also = ", nor the other way round" if part.repeat else ""
        raise ValueError(
            f"{part.count} {part.name} cannot be spread over {devices} devices: {devices} does not divide "
            f"{part.count}{also}"
        )

    def _shard(self, name: str, position: Mapping[str, int]) -> int:
        sizes, index = dict(self.sizes), 0
        for axis in self.over(name):
            index = index * sizes[axis] + position[axis]
        return index

    def _mesh_axes_of(self, axis: Axis) -> tuple[str, ...]:
        names = [axis] if not isinstance(axis, tuple) else [part.name for part in axis]
        over = {self.over(name) for name in names}
        assert len(over) == 1, f"parts of one dimension are spread over different mesh axes: {axis}"
        return over.pop()

    def _take(
        self, array: np.ndarray, dim: int, parts: tuple[Part, ...], position: Mapping[str, int]
    ) -> np.ndarray:
        start, taken = 0, []
        for part in parts:
            items = self.items(part, position)
            first, stop = (start + item * part.width for item in (items.start, items.stop))
            taken.append(array[(slice(None),) * dim + (slice(first, stop),)])
            missing = (self._share(part) - len(items)) * part.width
            if missing:
                shape = (*array.shape[:dim], missing, *array.shape[dim + 1 :])
                taken.append(np.zeros(shape, array.dtype))
            start += part.count * part.width
        return taken[0] if len(taken) == 1 else np.concatenate(taken, axis=dim)


def _parts(axis: Axis, size: int) -> tuple[Part, ...] | None:
    """The parts of a dimension; None if it is never spread."""
    if axis is None:
        return None
    parts = (Part(axis, size),) if isinstance(axis, str) else axis
    assert sum(part.count * part.width for part in parts) == size, f"{axis} do not make {size} entries"
    return parts
