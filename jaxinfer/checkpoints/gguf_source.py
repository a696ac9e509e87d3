"""Tensors of a GGUF file, dequantized block by block."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.gguf_metadata import GGUFHeader, GGUFTensor, read_gguf_header
from jaxinfer.checkpoints.gguf_names import ROPE_TENSORS, SUPPORTED_ARCHITECTURES, HFName, Transform, hf_name
from jaxinfer.checkpoints.tensor_source import TensorInfo, rows_per_chunk

_T = GGMLQuantizationType
_PLAIN: dict[int, np.dtype[Any]] = {
    _T.F32: np.dtype("<f4"),
    _T.F16: np.dtype("<f2"),
    _T.BF16: np.dtype(ml_dtypes.bfloat16),
}
_QUANTIZED = (_T.Q4_0, _T.Q4_1, _T.Q5_0, _T.Q5_1, _T.Q8_0, _T.Q4_K, _T.Q5_K, _T.Q6_K)
# Small enough for the cache; large enough that readers rarely ask for the interpreter lock.
_BLOCK_ELEMENTS = 1 << 18
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class _Entry:
    """One Hugging Face tensor: a GGUF tensor, or one expert of it.

    Attributes:
        offset: first byte in the file.
        row_bytes: bytes of one entry of the first axis.
        group: rows that a transform needs together (the head width), else 1.
    """

    path: Path
    raw_name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    row_bytes: int
    transform: Transform
    group: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return _PLAIN.get(self.type, np.dtype(np.float32))


def gguf_architecture(path: Path, header: GGUFHeader) -> str:
    """``general.architecture``, checked against what can be read."""
    architecture = header.metadata.get("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise CheckpointError(
            f"{path}: GGUF architecture {architecture!r} is not supported; supported are "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return str(architecture)


def split_files(path: Path, header: GGUFHeader) -> list[Path]:
    """All files of a GGUF model, the one with the metadata first."""
    count = int(header.metadata.get("split.count", 1))
    if count <= 1:
        return [path]
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise CheckpointError(
            f"{path}: one of {count} parts, but its name does not end in -0000N-of-{count:05d}.gguf"
        )
    if header.metadata.get("split.no", 0) != 0:
        raise CheckpointError(
            f"{path}: not the first of {count} parts; open {match[1]}-00001-of-{match[3]}.gguf"
        )
    files = [path.with_name(f"{match[1]}-{i + 1:05d}-of-{match[3]}.gguf") for i in range(count)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{path}: parts are missing: {missing}")
    return files


def _tensor_bytes(path: Path, tensor: GGUFTensor, header: GGUFHeader) -> tuple[GGMLQuantizationType, int]:
    """Checks type and extent of a tensor; returns its type and the bytes of its fastest axis."""
    known = {int(kind): kind for kind in _T}
    kind = known.get(tensor.type)
    if kind is None or (kind not in _PLAIN and kind not in _QUANTIZED):
        allowed = ", ".join(t.name for t in (*_PLAIN, *_QUANTIZED))  # type: ignore[attr-defined]
        name = tensor.type if kind is None else kind.name
        raise CheckpointError(f"{path}: tensor {tensor.name!r} has type {name}; readable are {allowed}")
    if kind in _QUANTIZED and len(tensor.shape) < 2:
        raise CheckpointError(
            f"{path}: tensor {tensor.name!r}: a vector stored as {kind.name} cannot be read"
        )
    block, block_bytes = GGML_QUANT_SIZES[kind]
    width = tensor.shape[-1] if tensor.shape else 1
    if width % block:
        raise CheckpointError(
            f"{path}: tensor {tensor.name!r}: rows of {width} do not fill {kind.name} blocks of {block}"
        )
    row = width // block * block_bytes
    end = header.data_start + tensor.offset + row * math.prod(tensor.shape[:-1])
    if end > header.file_size:
        raise CheckpointError(
            f"{path}: truncated: tensor {tensor.name!r} ends at byte {end} of {header.file_size}"
        )
    return kind, row


class GGUFSource:
    """``TensorSource`` over a GGUF file (or the first part of a split one).

    Quantized tensors come as float32, others as they are stored. Names, row order and norm weights are those
    of the Hugging Face checkpoint the file was made from; stacked experts are one tensor each. Tensors of the
    RoPE configuration are left out; tensors without a Hugging Face name keep their own.
    """

    def __init__(self, path: Path, header: GGUFHeader | None = None) -> None:
        header = header or read_gguf_header(path)
        architecture = gguf_architecture(path, header)
        self._heads = _head_counts(path, architecture, header)
        self._entries: dict[str, _Entry] = {}
        for file in split_files(path, header):
            file_header = header if file == path else read_gguf_header(file)
            for tensor in file_header.tensors:
                if tensor.name not in ROPE_TENSORS:
                    self._add(file, file_header, tensor, hf_name(architecture, tensor.name))

    def _add(self, path: Path, header: GGUFHeader, tensor: GGUFTensor, target: HFName | None) -> None:
        kind, inner_bytes = _tensor_bytes(path, tensor, header)
        target = target or HFName(tensor.name, "none")
        offset, shape = header.data_start + tensor.offset, tensor.shape
        if not target.stacked:
            row_bytes = inner_bytes * math.prod(shape[1:-1]) if len(shape) > 1 else _PLAIN[kind].itemsize
            group = self._group(path, tensor) if target.transform == "unpermute" else 1
            entry = _Entry(path, tensor.name, kind, shape, offset, row_bytes, target.transform, group)
            self._entries[target.template] = entry
            return
        if len(shape) != 3:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r}: experts are [E, out, in], not {list(shape)}"
            )
        for expert in range(shape[0]):
            start = offset + expert * shape[1] * inner_bytes
            entry = _Entry(path, tensor.name, kind, shape[1:], start, inner_bytes, target.transform, 1)
            self._entries[target.template.format(expert=expert)] = entry

    def _group(self, path: Path, tensor: GGUFTensor) -> int:
        heads = self._heads[0] if ".attn_q." in tensor.name else self._heads[1]
        if not tensor.shape or tensor.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r}: {list(tensor.shape)} are not {heads} heads of even width"
            )
        return tensor.shape[0] // heads

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def info(self, name: str) -> TensorInfo:
        entry = self._entries[name]
        return TensorInfo(entry.shape, entry.dtype, entry.type.name, entry.type not in _PLAIN)

    def read(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        if entry.type in _PLAIN and entry.transform == "none" and 0 not in entry.shape:
            return np.memmap(entry.path, entry.dtype, mode="r", offset=entry.offset, shape=entry.shape)
        return np.concatenate(list(self.chunks(name))).reshape(entry.shape)

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        entry = self._entries[name]
        shape = entry.shape or (1,)
        rows = rows_per_chunk(shape, entry.group, _BLOCK_ELEMENTS)
        with entry.path.open("rb") as file:
            file.seek(entry.offset)
            for start in range(0, shape[0], rows):
                count = min(rows, shape[0] - start)
                data = np.fromfile(file, np.uint8, count * entry.row_bytes)
                if data.size != count * entry.row_bytes:
                    raise CheckpointError(
                        f"{self.origin(name)}: tensor {name!r}: the file ended while it was read"
                    )
                yield _transformed(_decoded(data, entry, (count, *shape[1:])), entry)

    def blocks(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        if entry.type in _PLAIN or entry.transform == "minus_one":
            raise CheckpointError(f"{self.origin(name)}: tensor {name!r} is not kept in blocks")
        shape = (entry.shape[0], entry.row_bytes)
        return _transformed(np.memmap(entry.path, np.uint8, "r", entry.offset, shape), entry)

    def origin(self, name: str) -> str:
        entry = self._entries[name]
        return str(entry.path) if entry.raw_name == name else f"{entry.path} (as {entry.raw_name!r})"


def _head_counts(path: Path, architecture: str, header: GGUFHeader) -> tuple[int, int]:
    """Query and KV heads."""
    heads = header.metadata.get(f"{architecture}.attention.head_count")
    kv_heads = header.metadata.get(f"{architecture}.attention.head_count_kv", heads)
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or min(heads, kv_heads) < 1:
        raise CheckpointError(
            f"{path}: {architecture}.attention.head_count is {heads!r} and head_count_kv {kv_heads!r}; "
            "one positive number each, the same for all layers, is supported"
        )
    return heads, kv_heads


def _decoded(data: np.ndarray, entry: _Entry, shape: tuple[int, ...]) -> np.ndarray:
    if entry.type in _PLAIN:
        return data.view(entry.dtype).reshape(shape)
    # As one long row: blocks are independent, and the package loops in Python over groups of 16 rows.
    return dequantize(data.reshape(1, -1), entry.type).reshape(shape)


def _transformed(block: np.ndarray, entry: _Entry) -> np.ndarray:
    if entry.transform == "unpermute":
        paired = block.reshape(-1, entry.group // 2, 2, *block.shape[1:])
        return paired.swapaxes(1, 2).reshape(block.shape)
    if entry.transform == "minus_one":
        return (block.astype(np.float32) - 1.0).astype(entry.dtype)
    return block
