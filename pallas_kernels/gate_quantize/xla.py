"""Gate and quantization in XLA: the reference, which compiles to three or four kernels on a GPU."""

import jax

from pallas_kernels.gate.reference import GateActivation
from pallas_kernels.gate_quantize.reference import gate_quantize
from pallas_kernels.quantized_matmul.weights import Activation

__all__ = ["gate_quantize", "supports"]


def supports(gate_up_T2F: jax.Array, *, activation: GateActivation, to: Activation) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    return True, ""
