"""Gate of an MLP: the semantics, and XLA's formulation."""

import jax
import jax.numpy as jnp

from pallas_kernels.gate_quantize.reference import GateActivation, activate


def gate(gate_up_T2F: jax.Array, activation: GateActivation) -> jax.Array:
    """``activation(gate) * up`` (Shazeer, 2020) of the halves of the last axis: ``[T, F]``, computed in float32."""
    gate_TF, up_TF = jnp.split(gate_up_T2F.astype(jnp.float32), 2, axis=-1)
    return (activate(gate_TF, activation) * up_TF).astype(gate_up_T2F.dtype)
