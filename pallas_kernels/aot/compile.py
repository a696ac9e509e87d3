"""Compiles a function for a GPU that is not there. One program per process: see ``isolated``."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.aot.inspect import ProgramFacts, read_dumps
from pallas_kernels.aot.target import devices
from pallas_kernels.gpus import Gpu


@dataclass(frozen=True)
class Program:
    """A function and the shapes to compile it for.

    Attributes:
        fn: jittable.
        args: pytrees of ``jax.ShapeDtypeStruct``.
        donate: arguments whose buffers the outputs take.
        axes: mesh axes and their sizes; no axis: one device. The mesh is current while ``fn`` is traced.
        specs: a ``PartitionSpec`` for each leaf of ``args``, as a pytree prefix; replicated if absent.
        out_specs: the same of the results; the compiler's choice if absent.
        options: of the compiler, beside those of ``XLA_FLAGS``.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    axes: dict[str, int] = field(default_factory=dict)
    specs: Any = field(default_factory=PartitionSpec)
    out_specs: Any = None
    options: dict[str, str] = field(default_factory=dict)

    @property
    def donated_bytes(self) -> int:
        """Of one device."""
        specs = _leaf_specs(self)
        donated = [(self.args[i], specs[i]) for i in self.donate]
        sizes = [jax.tree.map(partial(_bytes_per_device, axes=self.axes), *pair) for pair in donated]
        return sum(jax.tree.leaves(sizes))


def prepare_environment(folder: Path) -> None:
    """Makes the compilers of this process write what they do into a folder; before JAX starts a backend."""
    jax.config.update("jax_platforms", "cpu")  # else JAX tries the plugin's platform and looks for a driver
    # The value is a pattern over names of dumps. A wider one writes every compiler pass: 10 s a kernel.
    flags = f"--xla_dump_to={folder} --xla_dump_emitter_re=ptx"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    os.environ.update(MOSAIC_GPU_DUMP_TO=str(folder), MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_PTXAS="1")
    # A program out of the cache is not compiled, and what is not compiled writes nothing.
    jax.config.update("jax_enable_compilation_cache", False)


def compile_program(program: Program, gpu: Gpu, folder: Path) -> ProgramFacts:
    """Compiles for a GPU and reads the result.

    Args:
        folder: of ``prepare_environment``.

    Raises:
        Exception: whatever lowering or compiling raises. Some errors of LLVM and Triton end the process instead.
    """
    count = math.prod(program.axes.values())
    mesh_devices = devices(gpu, count)
    names, sizes = tuple(program.axes) or ("device",), tuple(program.axes.values()) or (1,)
    mesh = Mesh(np.array(mesh_devices).reshape(sizes), names)
    started = time.monotonic()
    # The mesh tells Pallas-Triton the device. Mosaic reads the compute capability of the default device.
    with jax.set_mesh(mesh), jax.default_device(mesh_devices[0]):
        jitted = jax.jit(program.fn, donate_argnums=program.donate, **_out_shardings(program, mesh))
        lowered = jitted.trace(*_placed(program, mesh)).lower()
        compiled = lowered.compile(compiler_options=program.options or None)
    seconds = time.monotonic() - started
    memory = compiled.memory_analysis()
    return read_dumps(
        folder,
        hlo=compiled.as_text(),
        seconds=seconds,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
    )


def _placed(program: Program, mesh: Mesh) -> tuple[Any, ...]:
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        program.args,
        _leaf_specs(program),
    )


def _leaf_specs(program: Program) -> tuple[Any, ...]:
    return jax.tree.broadcast(program.specs, program.args, is_leaf=_is_spec)


def _bytes_per_device(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec, axes: dict[str, int]) -> int:
    names = jax.tree.leaves(tuple(spec))  # an axis, none, or a tuple of axes for each dimension
    return math.prod(leaf.shape) * leaf.dtype.itemsize // math.prod(axes[name] for name in names)


def _out_shardings(program: Program, mesh: Mesh) -> dict[str, Any]:
    if program.out_specs is None:
        return {}
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), program.out_specs, is_leaf=_is_spec)
    return {"out_shardings": shardings}


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
