"""What every checkpoint format offers: tensors by their Hugging Face names, one at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

CHUNK_ELEMENTS = 1 << 20
"""Elements of a block of ``TensorSource.chunks``: bounds the temporaries of casts and dequantization."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the headers describe it.

    Attributes:
        shape: as ``read`` returns it, Hugging Face order (``[out, in]``).
        dtype: of what ``read`` returns; float32 for quantized tensors.
        stored: the format's name of the stored type ("BF16", "Q4_1").
        quantized: stored in blocks with scales, so that ``dtype`` is not what the file holds.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stored: str
    quantized: bool = False


class TensorSource(Protocol):
    """Read access to the tensors of one checkpoint. Construction reads headers, never weights.

    All methods that take a name raise KeyError for one that ``names`` does not list.
    """

    def names(self) -> tuple[str, ...]:
        """All tensors, by Hugging Face name (``model.layers.0.input_layernorm.weight``)."""

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype, without reading the tensor."""

    def read(self, name: str) -> np.ndarray:
        """The whole tensor; a read-only memory map where the format allows it."""

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        """Consecutive blocks along the first axis, of at most about ``CHUNK_ELEMENTS`` elements."""

    def blocks(self, name: str) -> np.ndarray:
        """Rows of a quantized tensor as the file stores them, uint8 ``[shape[0], bytes of a row]``, in the order of
        ``read``; ``info(name).stored`` names their format. May be a read-only memory map. CheckpointError for a
        tensor that is not quantized.
        """

    def origin(self, name: str) -> str:
        """For messages: the file, and the tensor's name in it where that differs."""


def rows_per_chunk(shape: tuple[int, ...], multiple: int = 1, elements: int = CHUNK_ELEMENTS) -> int:
    """Rows of a block of ``chunks``: a multiple of ``multiple``, with about ``elements`` elements."""
    width = int(np.prod(shape[1:], dtype=np.int64))
    return max(1, elements // max(1, width * multiple)) * multiple
