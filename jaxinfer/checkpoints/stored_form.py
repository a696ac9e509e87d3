"""Weights in the form in which a checkpoint stores them: which parts they have, and reading them packed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoints.gguf_blocks import scales_are_finite
from jaxinfer.checkpoints.tensor_source import TensorInfo, TensorSource
from jaxinfer.checkpoints.values import page_aligned, read_into
from jaxinfer.checkpoints.weight_map import Source, WeightMap
from pallas_kernels.linear.packed import PackedWeight, pack_dense, pack_gguf, packed_struct, stack

_DENSE = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""Formats of plain arrays by their dtype."""


@dataclass(frozen=True)
class StoredPart:
    """Consecutive rows of a weight that share a format.

    Attributes:
        names: tensors, one below the other.
        dtype: None for rows of quantized blocks; else what plain rows are held in.
    """

    names: tuple[str, ...]
    format: str
    rows: int
    dtype: np.dtype[Any] | None


@dataclass(frozen=True)
class StoredForm:
    """A weight ``[O, I]`` as its parts along O."""

    parts: tuple[StoredPart, ...]
    width: int

    @property
    def quantized(self) -> bool:
        """Whether a part is held as quantized blocks."""
        return any(part.dtype is None for part in self.parts)

    @property
    def formats(self) -> tuple[str, ...]:
        """Of the parts."""
        return tuple(part.format for part in self.parts)

    def struct(self) -> PackedWeight:
        """The packed weight with shapes for arrays."""
        return stack([packed_struct(part.format, (part.rows, self.width)) for part in self.parts])


def stored_forms(
    shapes: Mapping[str, jax.ShapeDtypeStruct | PackedWeight],
    packable: Collection[str],
    weight_map: WeightMap,
    source: TensorSource,
    dtype: np.dtype[Any],
    formats: Collection[str],
) -> dict[str, StoredForm]:
    """The form of each packable parameter, from headers.

    Blocks of one of ``formats`` are kept; other blocks become values of ``dtype``. Plain tensors keep their dtype if
    ``dtype`` is float32, so that nothing is lost and nothing grows; they are cast to a ``dtype`` of 16 bits.
    Parameters whose tensors are missing or have the wrong shape are left out: ``load_params`` reports them.
    """
    names = frozenset(source.names())
    forms = {}
    for path in shapes:
        origin = weight_map.get(path)
        if (
            path not in packable
            or origin is None
            or not _plain(origin)
            or not names.issuperset(origin.parts[0])
        ):
            continue
        parts = _parts(origin.parts[0], shapes[path].shape, source, dtype, formats)
        if parts is not None:
            forms[path] = StoredForm(parts, shapes[path].shape[1])
    return forms


def read_packed(form: StoredForm, source: TensorSource) -> tuple[PackedWeight, list[str]]:
    """Reads and packs a weight; returns it with the problems found in its values."""
    packed, problems = [], []
    for part in form.parts:
        shape = (part.rows, form.width)
        if part.dtype is None:
            rows = [source.blocks(name) for name in part.names]
            problems += [
                f"tensor {name!r} in {source.origin(name)} has NaN or infinite scales"
                for name, rows_OB in zip(part.names, rows)
                if not scales_are_finite(part.format, rows_OB)
            ]
            rows_OB = rows[0] if len(rows) == 1 else np.concatenate(rows)
            packed.append(pack_gguf(part.format, rows_OB[: part.rows], shape))
        else:
            values_OI = page_aligned(shape, part.dtype)
            problems += read_into(values_OI, part.names, source)
            packed.append(pack_dense(values_OI))
    return stack(packed), problems


def _plain(origin: Source) -> bool:
    """Whether a parameter is nothing but tensors, one below the other."""
    return len(origin.parts) == 1 and not origin.optional and not origin.add and origin.rows is None


def _parts(
    names: tuple[str, ...],
    shape: tuple[int, ...],
    source: TensorSource,
    dtype: np.dtype[Any],
    formats: Collection[str],
) -> tuple[StoredPart, ...] | None:
    infos = [source.info(name) for name in names]
    if any(len(info.shape) != 2 or info.shape[1] != shape[1] for info in infos):
        return None
    parts: list[StoredPart] = []
    left = shape[0]
    for name, info in zip(names, infos):
        form, held = _format(info, dtype, formats)
        rows = min(info.shape[0], left)
        left -= rows
        if parts and parts[-1].format == form:
            last = parts.pop()
            parts.append(StoredPart((*last.names, name), form, last.rows + rows, held))
        else:
            parts.append(StoredPart((name,), form, rows, held))
    return tuple(parts) if left == 0 else None


def _format(
    info: TensorInfo, dtype: np.dtype[Any], formats: Collection[str]
) -> tuple[str, np.dtype[Any] | None]:
    """The format of a tensor, and the dtype of its values unless they stay in blocks."""
    if info.quantized and info.stored in formats:
        return info.stored, None
    lossless = dtype.itemsize == 4 and not info.quantized and info.dtype.name in _DENSE
    held = info.dtype if lossless else dtype
    return _DENSE[held.name], held
