"""Header of a GGUF file: metadata and tensor index, read without touching the weights.

Our own reader, because the ``gguf`` package makes an array object per metadata element: 3 s for a vocabulary
of 49k tokens, where this takes about 0.1 s. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_MAX_DIMS = 8


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor of a GGUF file lies.

    Attributes:
        shape: in numpy order (GGUF stores the fastest axis first).
        type: number of the ggml type (``gguf.GGMLQuantizationType``).
        offset: first byte, relative to the start of the data section.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    """Everything before the data section.

    Attributes:
        metadata: key to value; arrays are lists, strings are str.
        data_start: byte where the data section begins; tensor offsets count from here.
        file_size: bytes.
    """

    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]
    data_start: int
    file_size: int


class _Cursor:
    """Reads little-endian values off a buffer; every read is checked against its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self.position = 0

    def bytes(self, count: int) -> bytes:
        end = self.position + count
        if end > self._size:
            raise EOFError(f"{count} bytes wanted at byte {self.position} of {self._size}")
        start, self.position = self.position, end
        return self._data[start:end]

    def u32(self) -> int:
        return int(_U32.unpack(self.bytes(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.bytes(8))[0])

    def string(self) -> str:
        return str(self.bytes(self.u64()), "utf-8")

    def strings(self, count: int) -> list[str]:
        """The hot loop: a vocabulary has 10^5 entries, so the cursor is kept in locals."""
        data, position, unpack = self._data, self.position, _U64.unpack_from
        result = []
        for _ in range(count):
            start = position + 8
            position = start + unpack(data, position)[0]
            result.append(str(data[start:position], "utf-8"))
        self.bytes(position - self.position)
        return result

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.u32(), self.u64())
        dtype = _scalar_type(kind)
        return np.frombuffer(self.bytes(dtype.itemsize), dtype)[0].item()

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self.strings(count)
        dtype = _scalar_type(kind)  # an array of arrays is not read: no known key uses it
        return list(np.frombuffer(self.bytes(dtype.itemsize * count), dtype).tolist())


def _scalar_type(kind: int) -> np.dtype[Any]:
    if kind not in _SCALARS:
        raise CheckpointError(f"metadata type {kind} cannot be read here")
    return _SCALARS[kind]


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Checks magic and version; returns the numbers of tensors and of metadata entries."""
    magic = cursor.bytes(4)
    if magic != b"GGUF":
        raise CheckpointError(f"not a GGUF file: it starts with {magic!r}")
    version = cursor.u32()
    if version not in (2, 3):
        hint = (
            "a big-endian file? only little-endian ones are read"
            if version & 0xFFFF == 0
            else "2 and 3 are read"
        )
        raise CheckpointError(f"GGUF version {version} ({hint})")
    return cursor.u64(), cursor.u64()


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        if key in metadata:
            raise CheckpointError(f"metadata key {key!r} appears twice")
        try:
            metadata[key] = cursor.value(cursor.u32())
        except (CheckpointError, UnicodeDecodeError) as error:
            raise CheckpointError(f"metadata key {key!r}: {error}") from error
    return metadata


def _read_tensor_index(cursor: _Cursor, count: int) -> tuple[GGUFTensor, ...]:
    tensors: dict[str, GGUFTensor] = {}
    for _ in range(count):
        name, dims = cursor.string(), cursor.u32()
        if dims > _MAX_DIMS:
            raise CheckpointError(f"tensor {name!r}: {dims} dimensions, at most {_MAX_DIMS} are possible")
        if name in tensors:
            raise CheckpointError(f"tensor {name!r} appears twice")
        shape = tuple(reversed([cursor.u64() for _ in range(dims)]))
        tensors[name] = GGUFTensor(name, shape, cursor.u32(), cursor.u64())
    return tuple(tensors.values())


def _parse(data: mmap.mmap) -> GGUFHeader:
    cursor = _Cursor(data)
    num_tensors, num_keys = _read_preamble(cursor)
    metadata = _read_metadata(cursor, num_keys)
    tensors = _read_tensor_index(cursor, num_tensors)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"general.alignment is {alignment!r}, a power of two is needed")
    start = -(-cursor.position // alignment) * alignment
    return GGUFHeader(metadata, tensors, start, len(data))


def read_gguf_header(path: Path | str) -> GGUFHeader:
    """Reads metadata and tensor index of a GGUF file (versions 2 and 3, little-endian).

    Raises:
        CheckpointError: no such file, not GGUF, truncated, or malformed; the message names the file.
    """
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(data)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (EOFError, OverflowError, struct.error) as error:
        raise CheckpointError(f"{path}: the header is truncated ({error})") from error
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_gguf_metadata(path: Path | str) -> dict[str, Any]:
    """Metadata of a GGUF file, e.g. ``tokenizer.ggml.tokens`` (list of str), ``llama.block_count`` (int).

    Raises:
        CheckpointError: as ``read_gguf_header``.
    """
    return read_gguf_header(path).metadata
