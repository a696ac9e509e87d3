"""Residual sum, root mean square norm and quantization of its rows: the semantics."""

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.activations import quantize
from pallas_kernels.quantized_matmul.weights import Activation


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
    sum_TD = x_TD if residual_TD is None else x_TD + residual_TD
    wide_TD = sum_TD.astype(jnp.float32)
    inverse_T1 = jax.lax.rsqrt(jnp.mean(jnp.square(wide_TD), axis=-1, keepdims=True) + eps)
    return *quantize((wide_TD * inverse_T1 * weight_D).astype(x_TD.dtype), to, None), sum_TD
