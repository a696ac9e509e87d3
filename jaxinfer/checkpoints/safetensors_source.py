"""Safetensors checkpoints, in one file or in shards.

The header is read here and not by the ``safetensors`` package, which offers no memory map of a single
bfloat16 tensor in numpy and does not say which tensor a truncated file lacks. Format:
https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.tensor_source import TensorInfo, rows_per_chunk

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_WRAPPERS = ("model.language_model.", "language_model.")


def normalize_name(name: str) -> str:
    """Name of a language model's tensor as the plain text model has it.

    ``language_model.model.X`` and ``model.language_model.X`` (multimodal wrappers) become ``model.X``, a
    wrapped ``lm_head`` loses its prefix, and tensors of a model saved without its head (``layers.0...``) get
    ``model.``.
    """
    for wrapper in _WRAPPERS:
        if name.startswith(wrapper):
            name = name.removeprefix(wrapper)
            break
    name = name.removeprefix("model.") if name.startswith("model.lm_head.") else name
    return f"model.{name}" if name.startswith(("layers.", "embed_tokens.", "norm.")) else name


@dataclass(frozen=True)
class _Entry:
    path: Path
    raw_name: str
    shape: tuple[int, ...]
    stored: str
    offset: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return _DTYPES[self.stored]


def _read_json_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Returns the parsed header, the byte where the data begins, and the size of the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or 8 + length > size:
                raise CheckpointError(
                    f"{path}: truncated or not a safetensors file: the header wants {length} bytes"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: the safetensors header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not a JSON object")
    return header, 8 + length, size


def _entry(path: Path, name: str, value: Any, start: int, size: int) -> _Entry:
    try:
        stored, shape = str(value["dtype"]), tuple(int(n) for n in value["shape"])
        begin, end = (int(n) for n in value["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {name!r} has a malformed header entry: {value!r}") from error
    if stored not in _DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {stored!r}; readable are {', '.join(_DTYPES)}"
        )
    wanted = math.prod(shape) * _DTYPES[stored].itemsize
    if min(shape, default=0) < 0 or begin < 0 or end - begin != wanted:
        raise CheckpointError(
            f"{path}: tensor {name!r}: {stored} {list(shape)} is {wanted} bytes, not [{begin}, {end})"
        )
    if start + end > size:
        raise CheckpointError(
            f"{path}: truncated: tensor {name!r} ends at byte {start + end}, the file has {size} bytes"
        )
    return _Entry(path, name, shape, stored, start + begin)


def _read_file(path: Path) -> dict[str, _Entry]:
    """Entries of one file by raw name."""
    header, start, size = _read_json_header(path)
    return {
        name: _entry(path, name, value, start, size)
        for name, value in header.items()
        if name != "__metadata__"
    }


def _read_sharded(index_path: Path) -> dict[str, _Entry]:
    """Entries of all shards that the index names; it also decides between two shards that hold a tensor."""
    try:
        weight_map = json.loads(index_path.read_text())["weight_map"]
        shards = sorted(set(map(str, weight_map.values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index_path}: not a safetensors index ({error!r})") from error
    if outside := [shard for shard in shards if Path(shard).name != shard]:
        raise CheckpointError(f"{index_path}: shards must be files beside the index, not {outside}")
    if missing := [shard for shard in shards if not (index_path.parent / shard).is_file()]:
        raise CheckpointError(f"{index_path}: {len(missing)} of {len(shards)} shards are missing: {missing}")
    entries: dict[str, _Entry] = {}
    for shard in shards:
        in_shard = _read_file(index_path.parent / shard)
        absent = [name for name, home in weight_map.items() if home == shard and name not in in_shard]
        if absent:
            raise CheckpointError(
                f"{index_path.parent / shard}: the index places {len(absent)} tensors here that are not: "
                f"{absent[:10]}"
            )
        entries.update(
            {name: entry for name, entry in in_shard.items() if weight_map.get(name, shard) == shard}
        )
    return entries


def find_safetensors(directory: Path) -> Path | None:
    """The file to give to ``SafetensorsSource``: the index, ``model.safetensors``, or the only
    ``*.safetensors``.

    Returns None if there is none. Raises CheckpointError if there are several and no index.
    """
    for name in (INDEX_FILE, SINGLE_FILE):
        if (directory / name).is_file():
            return directory / name
    files = sorted(directory.glob("*.safetensors"))
    if len(files) > 1:
        raise CheckpointError(
            f"{directory}: {len(files)} safetensors files, but no {INDEX_FILE} to say what they hold"
        )
    return files[0] if files else None


class SafetensorsSource:
    """``TensorSource`` over a ``.safetensors`` file or a ``.index.json``."""

    def __init__(self, path: Path) -> None:
        raw = _read_sharded(path) if path.suffix == ".json" else _read_file(path)
        self._entries: dict[str, _Entry] = {}
        for raw_name, entry in raw.items():
            name = normalize_name(raw_name)
            if name in self._entries:
                other = self._entries[name]
                raise CheckpointError(
                    f"{entry.path}: tensors {other.raw_name!r} and {raw_name!r} both stand for {name!r}"
                )
            self._entries[name] = entry

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def info(self, name: str) -> TensorInfo:
        entry = self._entries[name]
        return TensorInfo(entry.shape, entry.dtype, entry.stored)

    def read(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        if 0 in entry.shape:
            return np.empty(entry.shape, entry.dtype)
        return np.memmap(entry.path, entry.dtype, mode="r", offset=entry.offset, shape=entry.shape)

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        # Plain reads, not the map: pages of a map count as memory of the process until it is closed.
        entry = self._entries[name]
        shape = entry.shape or (1,)
        rows = rows_per_chunk(shape)
        width = math.prod(shape[1:])
        with entry.path.open("rb") as file:
            file.seek(entry.offset)
            for start in range(0, shape[0], rows):
                count = min(rows, shape[0] - start)
                block = np.fromfile(file, np.uint8, count * width * entry.dtype.itemsize)
                if block.size != count * width * entry.dtype.itemsize:
                    raise CheckpointError(
                        f"{self.origin(name)}: tensor {name!r}: the file ended while it was read"
                    )
                yield block.view(entry.dtype).reshape(count, *shape[1:])

    def blocks(self, name: str) -> np.ndarray:
        raise CheckpointError(f"{self.origin(name)}: tensor {name!r} is not quantized")

    def origin(self, name: str) -> str:
        entry = self._entries[name]
        return str(entry.path) if entry.raw_name == name else f"{entry.path} (as {entry.raw_name!r})"
