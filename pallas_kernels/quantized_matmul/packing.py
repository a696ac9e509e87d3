"""Makes and reads ``QuantizedWeight`` arrays, in numpy: own quantizers, the packings of checkpoints, and the oracle.

Formats: AWQ (Lin et al., "AWQ: Activation-aware Weight Quantization", 2023) as AutoAWQ's "gemm" version stores it;
GPTQ (Frantar et al., 2022) as AutoGPTQ and GPTQModel do; float8_e4m3fn (Micikevicius et al., "FP8 formats for deep
learning", 2022) with one scale per tensor, per output, or per block.
"""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pallas_kernels.quantized_matmul.weights import (
    INT4_MIDDLE,
    PLANE,
    TILE,
    Activation,
    Format,
    QuantizedWeight,
    group_fits,
)

Array = Any
"""A numpy array."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP8_MAX = 448.0
_LIMITS: dict[Format, float] = {"int8": 127.0, "int4": 7.0, "fp8": FP8_MAX}


def quantize_int8(
    w_OI: Array, group: int | None = None, activation: Activation | None = None
) -> QuantizedWeight:
    """Rounds to signed bytes, symmetric, scales in float32 per output or per ``group`` inputs."""
    stored_OI, scale_GO = _quantize(w_OI, "int8", group)
    return assemble(np.rint(stored_OI).astype(np.int8), scale_GO, None, "int8", group, activation)


def quantize_int4(w_OI: Array, group: int | None = 128, zero_point: bool = False) -> QuantizedWeight:
    """Rounds to 4 bits: -7..7 symmetric, or 0..15 between the least and the largest value of a group."""
    if not zero_point:
        stored_OI, scale_GO = _quantize(w_OI, "int4", group)
        return assemble((np.rint(stored_OI) + INT4_MIDDLE).astype(np.uint8), scale_GO, None, "int4", group)
    w_OGg = _grouped(w_OI, group)
    low_OG = np.minimum(w_OGg.min(axis=2), 0)
    scale_OG = np.maximum(np.maximum(w_OGg.max(axis=2), 0) - low_OG, 1e-8) / 15
    zero_OG = np.clip(np.rint(-low_OG / scale_OG), 0, 15)
    stored_OGg = np.clip(np.rint(w_OGg / scale_OG[..., None]) + zero_OG[..., None], 0, 15)
    stored_OI = stored_OGg.reshape(len(w_OI), -1)[:, : w_OI.shape[1]].astype(np.uint8)
    return assemble(stored_OI, scale_OG.T, zero_OG.T.astype(np.int8), "int4", group)


def quantize_fp8(
    w_OI: Array, activation: Activation | None = "fp8", per_tensor: bool = False
) -> QuantizedWeight:
    """Rounds to float8_e4m3fn with a scale in float32 per output, or one for all."""
    stored_OI, scale_GO = _quantize(w_OI, "fp8", None)
    if per_tensor:
        scale_GO = np.full_like(scale_GO, scale_GO.max())
        stored_OI = w_OI / scale_GO[0, :, None]
    return assemble(stored_OI.astype(ml_dtypes.float8_e4m3fn), scale_GO, None, "fp8", None, activation)


def from_awq(qweight: Array, qzeros: Array, scales: Array) -> QuantizedWeight:
    """An AWQ matrix ("gemm" version).

    Args:
        qweight: int32 ``[I, O / 8]``; 4 bits j of a word belong to output ``AWQ_ORDER[j]`` of its eight.
        qzeros: int32 ``[G, O / 8]``, packed the same.
        scales: float16 ``[G, O]``.
    """
    stored_IO = _unpack(qweight, 4)[..., np.argsort(AWQ_ORDER)].reshape(len(qweight), -1)
    zero_GO = _unpack(qzeros, 4)[..., np.argsort(AWQ_ORDER)].reshape(len(qzeros), -1)
    group = _group_of(stored_IO.shape[0], len(scales), "AWQ")
    return assemble(stored_IO.T.astype(np.uint8), scales, zero_GO.astype(np.int8), "int4", group)


def from_gptq(
    qweight: Array,
    qzeros: Array,
    scales: Array,
    g_idx: Array | None = None,
    *,
    bits: int = 4,
    v2: bool = False,
) -> QuantizedWeight:
    """A GPTQ matrix of 4 or 8 bits.

    Args:
        qweight: int32 ``[I / n, O]``, n numbers of ``bits`` in a word, from the low bits up, are consecutive inputs.
        qzeros: int32 ``[G, O / n]``, consecutive outputs. Version 1 stores them minus one; its 15 is read as 16, as
            common kernels do.
        scales: float16 ``[G, O]``.
        g_idx: int32 ``[I]``, the group of each input. Out of order (``desc_act``), inputs are sorted by group.
        v2: zero points are stored as they are (``checkpoint_format`` "gptq_v2").

    Raises:
        ValueError: other bits, or groups of unequal sizes, which the layout cannot hold.
    """
    if bits not in (4, 8):
        raise ValueError(f"GPTQ weights of {bits} bits; allowed: 4 and 8")
    stored_IO = _unpack(qweight, bits).transpose(0, 2, 1).reshape(-1, qweight.shape[1])
    zero_GO = _unpack(qzeros, bits).reshape(len(qzeros), -1) + (0 if v2 else 1)
    group, order_I = _group_of(stored_IO.shape[0], len(scales), "GPTQ"), None
    if g_idx is not None and group is not None:
        in_order_I = np.arange(len(g_idx)) // group
        order_I = np.argsort(g_idx, kind="stable").astype(np.int32)
        if not np.array_equal(np.asarray(g_idx)[order_I], in_order_I):
            raise ValueError(f"GPTQ g_idx has groups that do not have {group} inputs each")
        stored_IO = stored_IO[order_I]
        order_I = None if np.array_equal(g_idx, in_order_I) else order_I
    if bits == 4:
        zeros = None if (zero_GO == INT4_MIDDLE).all() else zero_GO.astype(np.int8)
        return assemble(stored_IO.T.astype(np.uint8), scales, zeros, "int4", group, order_I=order_I)
    if zero_GO.max() > 255:
        raise ValueError("GPTQ zero point 256 of an 8-bit weight; allowed: 0 to 255")
    zeros = None if (zero_GO == 128).all() else (zero_GO - 128).astype(np.int8)
    return assemble((stored_IO.T - 128).astype(np.int8), scales, zeros, "int8", group, order_I=order_I)


def from_int8(w_OI: Array, scale: Array, activation: Activation | None = None) -> QuantizedWeight:
    """Signed bytes with a scale for all, or per output (``[O]`` or ``[O, 1]``)."""
    scale_GO = np.broadcast_to(np.asarray(scale).reshape(1, -1), (1, len(w_OI)))
    return assemble(np.asarray(w_OI, np.int8), scale_GO, None, "int8", None, activation)


def from_fp8(
    w_OI: Array, scale: Array, x_scale: Array | None = None, activation: Activation | None = "fp8"
) -> QuantizedWeight:
    """A float8_e4m3fn matrix.

    Args:
        scale: what values are multiplied with: a scalar, per output (``[O]`` or ``[O, 1]``), or per square block
            (``[O / 128, I / 128]``, "weight_scale_inv"; weight-only, since the activations of such models have
            scales per block too).
        x_scale: static scale of the activations.

    Raises:
        ValueError: block scales together with quantized activations.
    """
    scale = np.asarray(scale)
    if scale.size not in (1, len(w_OI)):
        if activation is not None:
            raise ValueError("fp8 weights with scales per block are served weight-only; pass activation=None")
        group = _group_of(-(-w_OI.shape[1] // TILE) * TILE, scale.shape[1], "fp8")
        scale_GO = np.repeat(scale, group or TILE, axis=0)[: len(w_OI)].T
        return assemble(w_OI, scale_GO, None, "fp8", group)
    scale_GO = np.broadcast_to(scale.reshape(1, -1), (1, len(w_OI)))
    return assemble(w_OI, scale_GO, None, "fp8", None, activation, x_scale=x_scale)


def assemble(
    stored_OI: Array,
    scale_GO: Array,
    zero_GO: Array | None,
    format: Format,
    group: int | None,
    activation: Activation | None = None,
    *,
    order_I: Array | None = None,
    x_scale: Array | None = None,
) -> QuantizedWeight:
    """The weight of stored numbers (int4: uint8 from 0 to 15) in the kernels' layout, padded to whole tiles."""
    O, I = stored_OI.shape
    J = -(-I // TILE)
    stored_OI = np.pad(stored_OI.view(np.uint8), ((0, 0), (0, J * TILE - I)))
    tiles_JOP = stored_OI.reshape(O, J, TILE).transpose(1, 0, 2)
    if format == "int4":
        tiles_JOP = tiles_JOP[..., :PLANE] | (tiles_JOP[..., PLANE:] << 4)
    G = 1 if group is None else -(-J * TILE // group)
    padding = ((0, G - len(scale_GO)), (0, 0))
    values = np.ascontiguousarray(tiles_JOP).view(ml_dtypes.float8_e4m3fn if format == "fp8" else np.int8)
    arrays: dict[str, Any] = {
        "values_JOP": values,
        "scale_GO": np.pad(scale_GO, padding),
        "zero_GO": None if zero_GO is None else np.pad(zero_GO, padding),
        "order_I": order_I,
        "x_scale": None if x_scale is None else np.float32(np.asarray(x_scale).reshape(())),
    }
    return QuantizedWeight(**arrays, format=format, group=group, activation=activation)


def concatenate(parts: tuple[QuantizedWeight, ...]) -> QuantizedWeight:
    """One weight of the outputs of several that read the same activations (q, k and v; gate and up).

    Raises:
        ValueError: formats, groups, activation scales or input orders that differ.
    """
    first = parts[0]
    for part in parts[1:]:
        same = (part.format, part.group, part.activation) == (first.format, first.group, first.activation)
        for a, b in ((part.order_I, first.order_I), (part.x_scale, first.x_scale)):
            same &= (a is None) == (b is None) and (a is None or b is None or np.array_equal(a, b))
        if not same:
            raise ValueError(
                "quantized weights with other formats, groups, activation scales or input orders"
            )
    has_zero = any(part.zero_GO is not None for part in parts)
    arrays: dict[str, Any] = {
        "values_JOP": np.concatenate([np.asarray(part.values_JOP) for part in parts], axis=1),
        "scale_GO": np.concatenate([np.asarray(part.scale_GO) for part in parts], axis=1),
        "zero_GO": np.concatenate([_zeros(part) for part in parts], axis=1) if has_zero else None,
    }
    return replace(first, **arrays)


def dequantize(w: QuantizedWeight) -> NDArray[np.float32]:
    """The matrix ``[O, J * 128]`` in float32, inputs in the stored order (``order_I``), padding included."""
    values_JOP = np.asarray(w.values_JOP)
    if w.format == "int4":
        bits_JOP = values_JOP.view(np.uint8)
        values_JOP = np.concatenate([bits_JOP & 15, bits_JOP >> 4], axis=2)
    J, O, _ = values_JOP.shape
    stored_OI = values_JOP.astype(np.float32).transpose(1, 0, 2).reshape(O, J * TILE)
    group = w.group or J * TILE
    scale_OI, zero_OI = (
        np.repeat(np.asarray(x_GO, np.float32).T, group, axis=1)[:, : J * TILE]
        for x_GO in (w.scale_GO, _zeros(w))
    )
    return scale_OI * (stored_OI - zero_OI)


def _zeros(w: QuantizedWeight) -> Array:
    if w.zero_GO is not None:
        return np.asarray(w.zero_GO)
    return np.full(w.scale_GO.shape, INT4_MIDDLE if w.format == "int4" else 0, np.int8)


def _unpack(words: Array, bits: int) -> Array:
    """The numbers in 32-bit words ``[.., n]``, from the low bits up, in a last axis."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return ((words.view(np.uint32)[..., None] >> shifts) & (2**bits - 1)).astype(np.int32)


def _group_of(inputs: int, groups: int, source: str) -> int | None:
    if groups == 1:
        return None
    group = inputs // groups
    if group * groups != inputs or not group_fits(group):
        raise ValueError(
            f"{source} weight of {inputs} inputs in {groups} groups; allowed: groups of 32, 64 and multiples of {TILE}"
        )
    return group


def _grouped(w_OI: Array, group: int | None) -> NDArray[np.float32]:
    """``[O, groups, inputs of a group]``, the last group padded with 0."""
    if group is not None and not group_fits(group):
        raise ValueError(f"group {group}; allowed: 32, 64 and multiples of {TILE}")
    O, I = w_OI.shape
    size = group or I
    padded_OI = np.pad(np.asarray(w_OI, np.float32), ((0, 0), (0, -I % size)))
    return padded_OI.reshape(O, -1, size)


def _quantize(w_OI: Array, format: Format, group: int | None) -> tuple[Array, Array]:
    """Unrounded stored numbers within the format's limits, and scales."""
    w_OGg = _grouped(w_OI, group)
    scale_OG = np.maximum(np.abs(w_OGg).max(axis=2), 1e-8) / _LIMITS[format]
    stored_OGg = w_OGg / scale_OG[..., None]
    return stored_OGg.reshape(len(w_OI), -1)[:, : w_OI.shape[1]], scale_OG.T.astype(np.float32)
