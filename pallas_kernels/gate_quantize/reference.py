"""Gate of an MLP and quantization of its rows: the semantics."""

import jax

from pallas_kernels.gate.reference import GateActivation, gate
from pallas_kernels.quantized_matmul.activations import quantize
from pallas_kernels.quantized_matmul.weights import Activation


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
    return quantize(gate(gate_up_T2F, activation), to, None)
