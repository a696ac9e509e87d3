"""Gate of an MLP by the native CPU library, for float32 and the activations that it has; the rest is XLA's."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gate import reference
from pallas_kernels.gate.reference import GateActivation
from pallas_kernels.native import library

_ACTIVATIONS: tuple[GateActivation, ...] = ("silu", "gelu_tanh")
"""By the number that the library knows them by."""


def gate(gate_up_T2F: jax.Array, activation: GateActivation) -> jax.Array:
    """See ``reference.gate``."""
    native = activation in _ACTIVATIONS and gate_up_T2F.ndim == 2 and gate_up_T2F.dtype == jnp.float32
    if not native or not library.available()[0]:
        return reference.gate(gate_up_T2F, activation)
    T, width = gate_up_T2F.shape
    call = jax.ffi.ffi_call("jaxinfer_gate", jax.ShapeDtypeStruct((T, width // 2), jnp.float32))
    return call(gate_up_T2F, activation=np.int64(_ACTIVATIONS.index(activation)))
