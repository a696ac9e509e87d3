"""What the loader has to know of GGUF's quantized blocks: where their scales are.

Source: the ``block_*`` structures of ggml (``ggml-common.h``).
"""

from dataclasses import dataclass

import numpy as np

_HALF_INFINITY = 0x7C00
"""Exponent bits of a half: all set means infinite or NaN."""


@dataclass(frozen=True)
class BlockLayout:
    """Attributes:
    size: bytes of a block.
    scales: byte offsets of its half-precision scales; everything else is an integer.
    """

    size: int
    scales: tuple[int, ...]


BLOCK_LAYOUTS = {
    "Q4_0": BlockLayout(18, (0,)),
    "Q4_1": BlockLayout(20, (0, 2)),
    "Q5_0": BlockLayout(22, (0,)),
    "Q8_0": BlockLayout(34, (0,)),
    "Q4_K": BlockLayout(144, (0, 2)),
    "Q6_K": BlockLayout(210, (208,)),
}
"""The formats that can be kept as they are stored."""


def scales_are_finite(form: str, rows_OB: np.ndarray) -> bool:
    """Whether all values of a tensor are finite: integers times finite halves always are, in float32.

    Args:
        rows_OB: uint8 rows of whole blocks.
    """
    layout = BLOCK_LAYOUTS[form]
    halves = rows_OB.reshape(-1, layout.size // 2, 2).view("<u2")[:, :, 0]
    exponents = halves[:, [offset // 2 for offset in layout.scales]] & _HALF_INFINITY
    return not (exponents == _HALF_INFINITY).any()
