"""What travels of blocks: their arrays as they are, or quantized."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.kv_transfer.connector import Array
from jaxinfer.kv_transfer.layout import BlockLayout, dtype_of
from jaxinfer.kv_transfer.quantization import dequantize, quantize
from jaxinfer.kv_transfer.transport import ArrayShape, num_bytes


@dataclass(frozen=True)
class Payload:
    """Turns contents of blocks into arrays that travel, and back.

    Attributes:
        layout: of the blocks of this engine.
        quantized: int8 with a scale per block and head.
    """

    layout: BlockLayout
    quantized: bool

    def shapes(self, layers: Sequence[int], num_blocks: int) -> list[ArrayShape]:
        """Of the arrays that travel."""
        dtype = dtype_of(self.layout.dtype)
        shapes: list[ArrayShape] = []
        for layer in layers:
            for dims in self.layout.shapes(layer, num_blocks):
                if self.quantized:
                    shapes += [(dims, np.dtype(np.int8)), (dims[:2], np.dtype(np.float32))]
                else:
                    shapes.append((dims, dtype))
        return shapes

    def num_bytes(self, layers: Sequence[int], num_blocks: int) -> int:
        return sum(map(num_bytes, self.shapes(layers, num_blocks)))

    def pack(self, contents: Sequence[Array], unused: int = 0) -> list[Array]:
        """Args:
        unused: slots at the end of the last block that hold anything.
        """
        if not self.quantized:
            return list(contents)
        return [part for x in contents for part in quantize(_without(np.asarray(x), unused))]

    def unpack(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        if not self.quantized:
            return tuple(arrays)
        dtype = dtype_of(self.layout.dtype)
        pairs = zip(arrays[::2], arrays[1::2])
        return tuple(dequantize(np.asarray(q), np.asarray(scale), dtype) for q, scale in pairs)


def _without(x_CKSh: np.ndarray, unused: int) -> np.ndarray:
    """Zeros in the last slots of the last block, where an infinite value would spoil the scale of the others."""
    if unused:
        x_CKSh = x_CKSh.copy()
        x_CKSh[-1, :, -unused:] = 0
    return x_CKSh
