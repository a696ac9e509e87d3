"""Checkpoints whose weights are float8 with a scale for each block, as DeepSeek-V3 is published."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.tensor_source import TensorInfo, TensorSource

SCALE = "_scale_inv"
"""Behind the name of a weight: the factors of its blocks, not their inverses as the name says."""


def fp8_block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block, from ``quantization_config``; None if weights have no scales of blocks.

    Raises:
        CheckpointError: the size is not two positive numbers.
    """
    spec = config.get("quantization_config")
    if not isinstance(spec, Mapping) or spec.get("quant_method") != "fp8":
        return None
    size = spec.get("weight_block_size")
    if size is None:
        return None
    if (
        not isinstance(size, list | tuple)
        or len(size) != 2
        or not all(type(n) is int and n > 0 for n in size)
    ):
        raise CheckpointError(
            f"config.json: quantization_config.weight_block_size must be two positive integers, not {size!r}"
        )
    return size[0], size[1]


class BlockScaledSource:
    """A ``TensorSource`` over another, with each weight that has scales multiplied by them: float32 values.

    Raises:
        CheckpointError: scales do not have the shape that goes with their weight; all of them are listed.
    """

    def __init__(self, stored: TensorSource, block: tuple[int, int]) -> None:
        self._stored = stored
        self._block = block
        names = frozenset(stored.names())
        self._scaled = frozenset(name for name in names if name + SCALE in names)
        problems = [problem for name in sorted(self._scaled) if (problem := self._problem(name))]
        if problems:
            raise CheckpointError("scales do not fit their weights:\n  - " + "\n  - ".join(problems[:50]))

    def names(self) -> tuple[str, ...]:
        scales = {name + SCALE for name in self._scaled}
        return tuple(name for name in self._stored.names() if name not in scales)

    def info(self, name: str) -> TensorInfo:
        info = self._stored.info(name)
        if name not in self._scaled:
            return info
        return TensorInfo(info.shape, np.dtype(np.float32), info.stored, quantized=True)

    def read(self, name: str) -> np.ndarray:
        return np.concatenate(list(self.chunks(name))) if name in self._scaled else self._stored.read(name)

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        if name not in self._scaled:
            yield from self._stored.chunks(name)
            return
        rows, columns = self._block
        scale = np.asarray(self._stored.read(name + SCALE), np.float32)
        width = self._stored.info(name).shape[1]
        first = 0
        for block in self._stored.chunks(name):
            of_rows = scale[np.arange(first, first + block.shape[0]) // rows]
            yield block.astype(np.float32) * np.repeat(of_rows, columns, axis=1)[:, :width]
            first += block.shape[0]

    def blocks(self, name: str) -> np.ndarray:
        return self._stored.blocks(name)

    def origin(self, name: str) -> str:
        return self._stored.origin(name)

    def _problem(self, name: str) -> str | None:
        shape, scale = self._stored.info(name).shape, self._stored.info(name + SCALE).shape
        rows, columns = self._block
        if len(shape) == 2 and scale == (-(-shape[0] // rows), -(-shape[1] // columns)):
            return None
        return (
            f"tensor {name + SCALE!r} in {self.origin(name)} has shape {list(scale)}, but blocks of {rows} x {columns} "
            f"of a weight of shape {list(shape)}"
        )
