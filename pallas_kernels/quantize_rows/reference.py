"""Quantization of rows by their largest magnitude: the semantics."""

import jax

from pallas_kernels.quantized_matmul.activations import quantize
from pallas_kernels.quantized_matmul.weights import Activation


def quantize_rows(x_TD: jax.Array, *, to: Activation) -> tuple[jax.Array, jax.Array]:
    """Rounds rows to "fp8" (float8_e4m3fn) or "int8", so that each row's largest magnitude is the format's largest.

    Returns:
        The rounded rows, and float32 ``[T]`` scales to multiply them with.
    """
    return quantize(x_TD, to, None)
