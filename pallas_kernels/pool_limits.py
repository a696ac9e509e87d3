"""Sizes of pool arrays that Pallas-Triton addresses correctly.

Its lowering uses 32-bit element offsets while an array has at most 2^32 bytes. An array of 1-byte elements between 2
and 4 GiB has more than 2^31 of them, so offsets into its upper half would wrap to negative ones. Larger arrays get
64-bit offsets.
"""

import math

import jax.numpy as jnp

MAX_OFFSETS_32 = 1 << 31
LARGEST_32_BIT_BYTES = 1 << 32


def offsets_fit(shape: tuple[int, ...], dtype: jnp.dtype) -> tuple[bool, str]:
    """Whether every element of an array can be addressed, and why not."""
    elements = math.prod(shape)
    size = elements * jnp.dtype(dtype).itemsize
    if elements > MAX_OFFSETS_32 and size <= LARGEST_32_BIT_BYTES:
        return False, (
            f"an array of {elements} elements of {jnp.dtype(dtype).name} ({size / 2**30:.2f} GiB) would be addressed "
            "with 32-bit offsets that overflow; allowed: at most 2 GiB, or more than 4 GiB"
        )
    return True, ""
