"""The blocks of GGUF's quantized formats, read into codes and factors.

Layouts as in ggml's ggml-common.h; the tests compare with ``gguf.quants``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Codes:
    """Quantized rows, X units each.

    Attributes:
        values: uint8 or int8 ``[O, X, unit]``.
        scale: float16 ``[O, X, 1]``.
        minimum: float16 ``[O, X, 1]``, or None.
        block_scales: uint8 or int8 ``[O, X, blocks]``, or None.
        block_minimums: uint8 ``[O, X, blocks]``, or None.
    """

    values: NDArray[np.generic]
    scale: NDArray[np.float16]
    minimum: NDArray[np.float16] | None = None
    block_scales: NDArray[np.generic] | None = None
    block_minimums: Bytes | None = None

    def factors(self) -> list[NDArray[np.generic]]:
        """Those that exist, in the order of the packed layout."""
        every = (self.scale, self.minimum, self.block_scales, self.block_minimums)
        return [factor for factor in every if factor is not None]


def read_blocks(format: str, blocks_OXb: Bytes) -> Codes:
    """Codes and factors of uint8 ``[O, X, bytes of a unit]``."""
    return _READERS[format](np.ascontiguousarray(blocks_OXb))


def _half(raw: Bytes) -> NDArray[np.float16]:
    return np.ascontiguousarray(raw).view(np.float16)


def _nibbles(raw: Bytes) -> Bytes:
    """Low nibbles of all bytes, then the high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _q4_0(raw: Bytes) -> Codes:
    return Codes(_nibbles(raw[..., 2:]), _half(raw[..., :2]))


def _q4_1(raw: Bytes) -> Codes:
    return Codes(_nibbles(raw[..., 4:]), _half(raw[..., :2]), _half(raw[..., 2:4]))


def _q5_0(raw: Bytes) -> Codes:
    fifth = np.unpackbits(raw[..., 2:6], axis=-1, bitorder="little")
    return Codes(_nibbles(raw[..., 6:]) | fifth << 4, _half(raw[..., :2]))


def _q8_0(raw: Bytes) -> Codes:
    return Codes(np.ascontiguousarray(raw[..., 2:]).view(np.int8), _half(raw[..., :2]))


def _q4_k(raw: Bytes) -> Codes:
    packed = raw[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    minimums = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    pairs = raw[..., 16:].reshape(*raw.shape[:-1], 4, 32)
    values = _nibbles(pairs).reshape(*raw.shape[:-1], 256)
    return Codes(values, _half(raw[..., :2]), _half(raw[..., 2:4]), scales, minimums)


def _q6_k(raw: Bytes) -> Codes:
    low = _nibbles(raw[..., :128].reshape(*raw.shape[:-1], 2, 64))
    pairs = raw[..., 128:192].reshape(*raw.shape[:-1], 2, 32)
    high = np.concatenate([pairs >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    values = (low | high << 4).reshape(*raw.shape[:-1], 256)
    scales = np.ascontiguousarray(raw[..., 192:208]).view(np.int8)
    return Codes(values, _half(raw[..., 208:210]), None, scales)


_READERS: dict[str, Callable[[Bytes], Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
