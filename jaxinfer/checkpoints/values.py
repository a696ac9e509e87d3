"""Tensors of a checkpoint as arrays of the dtype that is wanted, with their values checked."""

import mmap
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.tensor_source import TensorSource
from jaxinfer.checkpoints.weight_map import Rows

# Exponent bits all set: infinite or NaN. Comparing as integers is several times faster than isfinite in 16
# bits.
_INFINITY_BITS = {
    "float32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "float16": (np.uint16, 0x7FFF, 0x7C00),
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
}


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Raises CheckpointError for a dtype that parameters cannot have."""
    if dtype.name not in _INFINITY_BITS:
        raise CheckpointError(f"parameters can be {', '.join(_INFINITY_BITS)}, not {dtype.name}")


def read_into(
    rows: np.ndarray,
    names: tuple[str, ...],
    source: TensorSource,
    add: float = 0.0,
    picked: Rows | None = None,
) -> list[str]:
    """Fills an array with tensors, one below the other, and returns the problems found in their values.

    Args:
        rows: at least one axis; surplus rows of a tensor are dropped.
        add: constant added in float32, before the cast.
        picked: rows that are taken of each tensor; None for all.
    """
    problems: list[str] = []
    start = 0
    for name in names:
        values = _Values(rows.dtype)
        first = 0
        for stored in source.chunks(name):
            block = stored if picked is None else stored[_picked(picked, first, stored.shape[0])]
            first += stored.shape[0]
            into = rows[start : start + block.shape[0]]
            values.copy(into, block[: into.shape[0]], add)
            start += into.shape[0]
        problems += values.problems(name, source)
    return problems


def _picked(picked: Rows, first: int, count: int) -> np.ndarray:
    """Which of ``count`` rows from ``first`` on are taken."""
    place = np.arange(first, first + count) % picked.period
    return (place >= picked.start) & (place < picked.stop)


def page_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array in pages of its own: JAX on CPUs adopts it without a copy, and freeing it returns them."""
    size = int(np.prod(shape, dtype=np.int64))
    pages = mmap.mmap(-1, max(1, size * dtype.itemsize))
    return np.frombuffer(pages, dtype, size).reshape(shape)


class _Values:
    """Copies the blocks of one tensor and remembers whether their values survive the cast."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._bits, self._mask, self._infinity = _INFINITY_BITS[dtype.name]
        self._stored_bad = False
        self._largest = 0.0

    def copy(self, rows: np.ndarray, block: np.ndarray, add: float) -> None:
        if add:
            block = block.astype(np.float32) + np.float32(add)
        with np.errstate(over="ignore", invalid="ignore"):  # checked below
            rows[...] = block
        bits = np.ascontiguousarray(rows).view(self._bits) & self._mask
        if bits.size and int(bits.max()) >= self._infinity:
            values = block.astype(np.float64)
            finite = np.isfinite(values)
            self._stored_bad |= not finite.all()
            self._largest = max(self._largest, float(np.abs(values[finite]).max(initial=0.0)))

    def problems(self, name: str, source: TensorSource) -> Iterator[str]:
        where = f"tensor {name!r} in {source.origin(name)}"
        if self._stored_bad:
            yield f"{where} holds NaN or infinite values"
        elif self._largest:
            limit = float(jnp.finfo(self._dtype).max)
            yield (
                f"{where}: values up to {self._largest:.4g} become infinite in {self._dtype.name}, "
                f"whose largest is {limit:.4g}"
            )
