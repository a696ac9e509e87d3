"""Weights in the layout of the native CPU products, and how they are made from arrays and GGUF blocks."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pallas_kernels.linear.formats import FORMATS, LANES, Format, word_fields
from pallas_kernels.linear.gguf_blocks import Codes, read_blocks

_DENSE = {np.dtype(np.float32): "f32", np.dtype(ml_dtypes.bfloat16): "bf16", np.dtype(np.float16): "f16"}
_CACHED_CODES = 1 << 17
"""Codes that are packed at a time."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedWeight:
    """A weight ``[O, I]`` of one or more parts stacked along O, each in its own format.

    Attributes:
        data: per part uint8 ``[tiles, bytes of a tile]``; see ``formats``.
        formats: per part a key of ``FORMATS``.
        sizes: outputs per part; they add up to O.
        inputs: I.
    """

    data: tuple[jax.Array, ...]
    formats: tuple[str, ...] = field(metadata={"static": True})
    sizes: tuple[int, ...] = field(metadata={"static": True})
    inputs: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return sum(self.sizes), self.inputs

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return sum(math.prod(part.shape) for part in self.data)


def pack_dense(w_OI: NDArray[np.generic]) -> PackedWeight:
    """Packs an array of float32, bfloat16 or float16, without rounding.

    Raises:
        ValueError: another dtype, or not two dimensions.
    """
    w_OI = np.asarray(w_OI)
    if w_OI.ndim != 2 or w_OI.dtype not in _DENSE:
        raise ValueError(
            f"pack_dense: expected [O, I] of float32, bfloat16 or float16, got {w_OI.dtype} {w_OI.shape}"
        )
    name = _DENSE[w_OI.dtype]
    O, I = w_OI.shape
    bits_OI = w_OI.view(np.uint32 if w_OI.dtype.itemsize == 4 else np.uint16)
    padded = -(-I // FORMATS[name].unit) * FORMATS[name].unit
    lanes = _lanes_last(np.pad(bits_OI, ((0, 0), (0, padded - I))))
    if name == "bf16":
        lanes = _words(lanes.astype(np.uint32), 2, (((0, 0, 16),), ((0, 16, 16),)))
    data = np.ascontiguousarray(lanes).reshape(lanes.shape[0], -1).view(np.uint8)
    return PackedWeight((jnp.asarray(data),), (name,), (O,), I)


def pack_gguf(format: str, rows: NDArray[np.uint8], shape: tuple[int, int]) -> PackedWeight:
    """Packs the raw blocks of a GGUF tensor, without rounding.

    Args:
        format: Q4_0, Q4_1, Q5_0, Q8_0, Q4_K or Q6_K.
        rows: uint8 ``[O, bytes of a row]``, as ``gguf.GGUFReader`` gives them.
        shape: (O, I).

    Raises:
        ValueError: an unknown format, or rows that do not have that shape.
    """
    fmt = FORMATS.get(format)
    if fmt is None or fmt.dense:
        known = ", ".join(name for name, value in FORMATS.items() if not value.dense)
        raise ValueError(f"pack_gguf: format {format!r} is unknown; allowed: {known}")
    O, I = shape
    if I % fmt.unit or rows.shape != (O, I // fmt.unit * fmt.file_bytes) or rows.dtype != np.uint8:
        raise ValueError(
            f"pack_gguf: {rows.dtype} {rows.shape} is not [O, I] = {shape} in blocks of {format}"
        )
    tiles = np.empty((-(-O // LANES), fmt.units(I) * fmt.unit_bytes), np.uint8)
    # A few tiles at a time, so that what is between stays in the cache: three to four times faster.
    step = max(1, _CACHED_CODES // (I * LANES))
    for first in range(0, len(tiles), step):
        some = rows[first * LANES : (first + step) * LANES]
        codes = read_blocks(format, some.reshape(-1, I // fmt.unit, fmt.file_bytes))
        tiles[first : first + step] = _pack_units(fmt, codes)
    return PackedWeight((jnp.asarray(tiles),), (format,), (O,), I)


def packed_struct(format: str, shape: tuple[int, int]) -> PackedWeight:
    """What ``pack_dense`` and ``pack_gguf`` make of a weight of that shape, with a ``ShapeDtypeStruct`` as its data.

    Raises:
        ValueError: an unknown format.
    """
    fmt = FORMATS.get(format)
    if fmt is None:
        raise ValueError(f"packed_struct: format {format!r} is unknown; allowed: {', '.join(FORMATS)}")
    O, I = shape
    data: Any = jax.ShapeDtypeStruct((-(-O // LANES), fmt.units(I) * fmt.unit_bytes), jnp.uint8)
    return PackedWeight((data,), (format,), (O,), I)


def stack(parts: list[PackedWeight]) -> PackedWeight:
    """One weight of several along O; nothing is copied.

    Raises:
        ValueError: the weights differ in their inputs, or there are none.
    """
    if not parts or len({part.inputs for part in parts}) != 1:
        raise ValueError(f"stack: weights must have equal inputs, got {[part.shape for part in parts]}")
    return PackedWeight(
        tuple(data for part in parts for data in part.data),
        tuple(name for part in parts for name in part.formats),
        tuple(size for part in parts for size in part.sizes),
        parts[0].inputs,
    )


def unpack(w: PackedWeight) -> jax.Array:
    """The weight as float32 ``[O, I]``, the same bits as ``gguf.quants.dequantize``; may be traced."""
    parts = [
        _unpack_part(FORMATS[name], name, data)[:size, : w.inputs]
        for name, size, data in zip(w.formats, w.sizes, w.data, strict=True)
    ]
    return jnp.concatenate(parts)


def _lanes_last(a: NDArray[np.generic]) -> NDArray[np.generic]:
    """``[O, ...]`` to ``[tiles, ..., LANES]``, padded with zeros."""
    pad = -a.shape[0] % LANES
    a = np.pad(a, ((0, pad), *((0, 0),) * (a.ndim - 1)))
    return np.moveaxis(a.reshape(-1, LANES, *a.shape[1:]), 1, -1)


def _words(
    codes: NDArray[np.uint32], period: int, fields: tuple[tuple[tuple[int, int, int], ...], ...]
) -> NDArray[np.uint32]:
    """Codes ``[..., X, LANES]`` to words ``[..., words, LANES]``."""
    count = 1 + max(word for pieces in fields for word, _, _ in pieces)
    codes = codes.reshape(*codes.shape[:-2], -1, period, LANES)
    words = np.zeros((*codes.shape[:-2], count, LANES), np.uint32)
    for i, pieces in enumerate(fields):
        taken = 0
        for word, shift, bits in pieces:
            words[..., word, :] |= (codes[..., i, :] >> taken & ((1 << bits) - 1)) << shift
            taken += bits
    return words.reshape(*words.shape[:-3], -1, LANES)


def _nibble_words(values: NDArray[np.generic]) -> NDArray[np.uint32]:
    """What ``_words`` makes of four-bit codes ``[..., X]``, before the lanes are last: ``[..., X / 8]``."""
    codes = values.view(np.uint8)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    return np.ascontiguousarray(pairs).view(np.dtype("<u4"))


def _pack_units(fmt: Format, codes: Codes) -> NDArray[np.uint8]:
    if fmt.bits == 4:
        packed = _lanes_last(_nibble_words(codes.values))
    elif fmt.bits == 8:
        packed = _lanes_last(np.ascontiguousarray(codes.values).view(np.dtype("<u4")))
    else:
        packed = _words(_lanes_last(codes.values).astype(np.uint32), *word_fields(fmt.bits))
    fields = [packed, *(_lanes_last(factor) for factor in codes.factors())]
    units = [
        np.ascontiguousarray(part).reshape(*part.shape[:2], -1).view(np.uint8)
        if part.ndim > 3
        else np.ascontiguousarray(part).view(np.uint8)
        for part in fields
    ]
    unit = np.concatenate(units, axis=-1)
    assert unit.shape[-1] == fmt.unit_bytes
    return unit.reshape(unit.shape[0], -1)


def _unpack_part(fmt: Format, name: str, data: jax.Array) -> jax.Array:
    """One part as float32 ``[tiles * LANES, units * unit]``."""
    unit = data.reshape(data.shape[0], -1, fmt.unit_bytes)
    numbers = _unpack_dense(name, unit) if fmt.dense else _unpack_quantized(fmt, unit)
    return jnp.moveaxis(numbers, -1, 1).reshape(data.shape[0] * LANES, -1)


def _unpack_dense(name: str, unit: jax.Array) -> jax.Array:
    """``[tiles, units, unit, LANES]``."""
    if name == "bf16":
        words = _as(unit, jnp.uint32).reshape(*unit.shape[:2], -1, 1, LANES)
        both = jnp.concatenate([words << 16, words >> 16 << 16], axis=-2)
        return jax.lax.bitcast_convert_type(both, jnp.float32).reshape(*unit.shape[:2], -1, LANES)
    dtype = jnp.float32 if name == "f32" else jnp.float16
    return _as(unit, dtype).reshape(*unit.shape[:2], -1, LANES).astype(jnp.float32)


def _unpack_quantized(fmt: Format, unit: jax.Array) -> jax.Array:
    """``[tiles, units, unit, LANES]``."""
    lead, blocks = unit.shape[:2], fmt.unit // fmt.block
    codes = _unpack_codes(fmt, unit[..., : fmt.code_bytes]).reshape(*lead, blocks, fmt.block, LANES)
    halves = _as(unit[..., fmt.code_bytes :][..., : 2 * LANES * (1 + fmt.minimum)], jnp.float16)
    halves = halves.reshape(*lead, -1, 1, 1, LANES).astype(jnp.float32)
    bytes_ = unit[..., fmt.code_bytes + 2 * LANES * (1 + fmt.minimum) :].reshape(*lead, -1, 1, LANES)
    scale = halves[:, :, 0]
    minimum = halves[:, :, 1] if fmt.minimum else None
    if fmt.block_factors:
        factors = bytes_[:, :, :blocks]
        signed = factors if fmt.minimum else jax.lax.bitcast_convert_type(factors, jnp.int8)
        scale = scale * signed.astype(jnp.float32)
        minimum = -minimum * bytes_[:, :, blocks:].astype(jnp.float32) if minimum is not None else None
    numbers = (codes - fmt.offset).astype(jnp.float32) * scale
    # All products are exact in float32, so a fused multiply-add rounds as two operations do.
    return (numbers if minimum is None else numbers + minimum).reshape(*lead, fmt.unit, LANES)


def _unpack_codes(fmt: Format, data: jax.Array) -> jax.Array:
    """int32 ``[tiles, units, unit, LANES]``."""
    if fmt.bits == 8:
        bytes_ = jax.lax.bitcast_convert_type(data, jnp.int8).reshape(*data.shape[:2], -1, LANES, 4)
        return jnp.moveaxis(bytes_, -1, -2).astype(jnp.int32).reshape(*data.shape[:2], -1, LANES)
    period, fields = word_fields(fmt.bits)
    words = _as(data, jnp.uint32).reshape(*data.shape[:2], fmt.unit // period, -1, LANES)
    codes = []
    for pieces in fields:
        code, taken = jnp.zeros_like(words[..., 0, :]), 0
        for word, shift, bits in pieces:
            code |= (words[..., word, :] >> shift & ((1 << bits) - 1)) << taken
            taken += bits
        codes.append(code.astype(jnp.int32))
    return jnp.stack(codes, axis=-2).reshape(*data.shape[:2], fmt.unit, LANES)


def _as(data: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Bytes ``[..., X]`` as numbers ``[..., X / size]``."""
    size = jnp.dtype(dtype).itemsize
    return jax.lax.bitcast_convert_type(data.reshape(*data.shape[:-1], -1, size), dtype)
