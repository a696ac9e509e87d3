"""Random weights in the formats of the native products."""

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pallas_kernels.linear.formats import FORMATS
from pallas_kernels.linear.packed import PackedWeight, pack_dense, pack_gguf

DENSE = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}
"""Where the float16 factors of a block lie."""


def random_rows(rng: np.random.Generator, name: str, O: int, I: int) -> NDArray[np.uint8]:
    """GGUF blocks of random bytes with finite factors; every code, factor and sign occurs."""
    fmt = FORMATS[name]
    raw = rng.integers(0, 256, (O, I // fmt.unit, fmt.file_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        factors = rng.normal(size=(*raw.shape[:2], 1)) / (1 << fmt.bits)
        raw[..., at : at + 2] = factors.astype(np.float16).view(np.uint8)
    return raw.reshape(O, -1)


def random_weight(
    rng: np.random.Generator, name: str, O: int, I: int
) -> tuple[PackedWeight, NDArray[np.float32]]:
    """A packed weight, and the same as float32 ``[O, I]`` by another way."""
    if name in DENSE:
        w_OI = (rng.normal(size=(O, I)) / I**0.25).astype(DENSE[name])
        return pack_dense(w_OI), w_OI.astype(np.float32)
    rows = random_rows(rng, name, O, I)
    return pack_gguf(name, rows, (O, I)), gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])
