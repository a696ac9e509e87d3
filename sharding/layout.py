"""Where the arrays and programs of a model run: one device, or all devices of a mesh together."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from sharding.axes import Axis, AxisRules

WHOLE = PartitionSpec()
"""The same on every device."""


@dataclass(frozen=True)
class Layout:
    """A mesh and how arrays lie on it. Hashable.

    Programs are written for one device and say where devices add or join their shares (``AxisRules.sum``, ``join``), so
    that kernels see plain arrays and the communication of a program is what its source says.

    Attributes:
        rules: of the logical axes.
        mesh: the devices; None: one device, or while a program is compiled for a mesh that is current
            (``jax.set_mesh``).
    """

    rules: AxisRules
    mesh: Mesh | None = None

    @property
    def num_devices(self) -> int:
        return math.prod(size for _, size in self.rules.sizes)

    def spread(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """The function on every device of the mesh, each with its shares of the arguments; the function itself on one.

        Args:
            in_specs, out_specs: ``PartitionSpec`` pytree prefixes. What is ``WHOLE`` has to come out equal everywhere.
        """
        if self.num_devices == 1:
            return function
        # Kernels do not say over which axes their results vary, so that cannot be checked.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def place(self, array: np.ndarray, axes: tuple[Axis, ...]) -> jax.Array:
        """Puts a host array on the devices, each share straight onto its own; a process does so for its own devices.

        The result has the shares one behind the other. It may be larger than the array: repeated items are there
        several times, and shares that are too short are filled with zeros.
        """
        if self.mesh is None:
            return jax.device_put(array)
        shape = self.placed_shape(array.shape, axes)
        blocks = [
            jax.device_put(self.rules.block(array, axes, position), SingleDeviceSharding(device))
            for device, position in self._positions()
            if device.process_index == jax.process_index()
        ]
        return jax.make_array_from_single_device_arrays(
            shape, NamedSharding(self.mesh, self.rules.spec(axes)), blocks
        )

    def placed_shape(self, shape: tuple[int, ...], axes: tuple[Axis, ...]) -> tuple[int, ...]:
        """Shape of what ``place`` makes of an array of that shape."""
        local = tuple(self.rules.local(axis, size) for axis, size in zip(axes, shape, strict=True))
        return self.joined_shape(local, self.rules.spec(axes))

    def joined_shape(self, local: tuple[int, ...], spec: PartitionSpec) -> tuple[int, ...]:
        """Shape of an array whose shares have that shape."""
        sizes = dict(self.rules.sizes)
        over = (*spec, *(None,) * (len(local) - len(spec)))
        return tuple(
            size * math.prod(sizes[name] for name in jax.tree.leaves(names))
            for size, names in zip(local, over)
        )

    def make(self, function: Callable[[], Any], specs: Any) -> Any:
        """Runs a function of no arguments, with its results spread by ``specs`` (a pytree prefix)."""
        if self.mesh is None:
            return function()
        mesh = self.mesh
        shardings = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
        return jax.jit(function, out_shardings=shardings)()

    def bring(self, x: jax.Array | np.ndarray) -> jax.Array:
        """An array of the host, or one that is whole on other devices, whole on each of these."""
        return jax.device_put(x, None if self.mesh is None else NamedSharding(self.mesh, WHOLE))

    def compile_sums(self) -> Callable[[], None]:
        """Compiles a sum over every group of devices that share a logical axis.

        CPU processes connect to each other in the first sum of a group, where gloo waits 30 s for one that is late, and
        then fails; in later ones they wait much longer. So processes that may be late, because they read or compile,
        run these sums when they have met.

        Returns:
            Runs the sums, and waits for them.
        """
        groups = sorted({over for name, _ in self.rules.mesh_axes if (over := self.rules.over(name))})
        one = np.ones(1, np.float32)
        sums = [jax.jit(self.spread(partial(lax.psum, axis_name=over), (WHOLE,), WHOLE)) for over in groups]
        programs = [program.lower(one).compile() for program in sums]

        def run() -> None:
            for program in programs:
                jax.block_until_ready(program(one))

        return run

    def struct(self, local: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        """What stands for an array, whose shares look like that, when programs are compiled before it is there."""
        sharding = None if self.mesh is None else NamedSharding(self.mesh, spec)
        return jax.ShapeDtypeStruct(self.joined_shape(local.shape, spec), local.dtype, sharding=sharding)

    def _positions(self) -> Iterator[tuple[jax.Device, dict[str, int]]]:
        assert self.mesh is not None
        for index, device in np.ndenumerate(self.mesh.devices):
            yield device, dict(zip(self.mesh.axis_names, index))


NOTHING_SPREAD = AxisRules((), ())
ONE_DEVICE = Layout(NOTHING_SPREAD)
