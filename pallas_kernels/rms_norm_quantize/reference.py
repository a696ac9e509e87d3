"""Residual sum, root mean square norm and quantization of its rows: the semantics."""

import jax

from pallas_kernels.quantized_matmul.activations import quantize
from pallas_kernels.quantized_matmul.weights import Activation
from pallas_kernels.rms_norm.reference import rms_norm


def rms_norm_quantize(
    x_TD: jax.Array,
    weight_D: jax.Array,
    residual_TD: jax.Array | None = None,
    *,
    eps: float,
    to: Activation,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalises ``x + residual`` (Zhang and Sennrich, 2019) and quantizes each row by its largest magnitude.

    Args:
        weight_D: float32 factors of the norm, an offset included.
        residual_TD: of the dtype of x; None: nothing is added.
        to: "fp8" (float8_e4m3fn) or "int8".

    Returns:
        The quantized rows, their float32 ``[T]`` scales, and the sum in the dtype of x, to which the norm is rounded
        as well before it is quantized.
    """
    normalised_TD, sum_TD = rms_norm(x_TD, weight_D, residual_TD, eps=eps)
    return *quantize(normalised_TD, to, None), sum_TD
