"""Quantization of activations before a product: the same for the oracle and for every backend."""

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.weights import Activation

LIMITS: dict[Activation, float] = {"int8": 127.0, "fp8": 448.0}
_LEAST_SCALE = 1e-12


def quantize(x_TI: jax.Array, to: Activation, x_scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Rounds rows to int8 or float8_e4m3fn.

    Args:
        x_scale: scalar for all rows; values out of range saturate. None: each row's largest magnitude becomes the
            largest number of the format.

    Returns:
        The rounded rows, and float32 ``[T]`` scales to multiply them with.
    """
    x_TI = x_TI.astype(jnp.float32)
    if x_scale is None:
        scale_T = jnp.maximum(jnp.max(jnp.abs(x_TI), axis=1) / LIMITS[to], _LEAST_SCALE)
    else:
        scale_T = jnp.full(x_TI.shape[0], x_scale, jnp.float32)
    scaled_TI = jnp.clip(x_TI / scale_T[:, None], -LIMITS[to], LIMITS[to])
    if to == "fp8":
        return scaled_TI.astype(jnp.float8_e4m3fn), scale_T
    return jnp.rint(scaled_TI).astype(jnp.int8), scale_T
