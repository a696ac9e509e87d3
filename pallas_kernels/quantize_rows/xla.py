"""Quantization of rows in XLA: the reference, which compiles to three kernels on a GPU."""

import jax

from pallas_kernels.quantize_rows.reference import quantize_rows
from pallas_kernels.quantized_matmul.weights import Activation

__all__ = ["quantize_rows", "supports"]


def supports(x_TD: jax.Array, *, to: Activation) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    return True, ""
