"""Gate of an MLP and quantization of its rows: the semantics."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.activations import quantize
from pallas_kernels.quantized_matmul.weights import Activation

GateActivation = Literal["silu", "gelu_tanh", "gelu"]


def gate_quantize(
    gate_up_T2F: jax.Array, *, activation: GateActivation, to: Activation
) -> tuple[jax.Array, jax.Array]:
    """``activation(gate) * up`` (Shazeer, 2020) of the halves of the last axis, each row quantized.

    Args:
        to: "fp8" (float8_e4m3fn) or "int8".

    Returns:
        ``[T, F]`` quantized by the largest magnitude of its row, and float32 ``[T]`` scales. The gate is computed in
        float32 and rounded to the dtype of its input before it is quantized.
    """
    gate_TF, up_TF = jnp.split(gate_up_T2F.astype(jnp.float32), 2, axis=-1)
    return quantize((activate(gate_TF, activation) * up_TF).astype(gate_up_T2F.dtype), to, None)


def activate(x: jax.Array, activation: GateActivation) -> jax.Array:
    """The activation function; the approximate gelu is that of Hendrycks and Gimpel (2016)."""
    match activation:
        case "silu":
            return jax.nn.silu(x)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
