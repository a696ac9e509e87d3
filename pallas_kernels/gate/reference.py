"""Gate of an MLP: the semantics, and XLA's formulation."""

from typing import Literal

import jax
import jax.numpy as jnp

GateActivation = Literal["silu", "gelu_tanh", "gelu"]


def gate(gate_up_T2F: jax.Array, activation: GateActivation) -> jax.Array:
    """``activation(gate) * up`` (Shazeer, 2020) of the halves of the last axis: ``[T, F]``, computed in float32."""
    gate_TF, up_TF = jnp.split(gate_up_T2F.astype(jnp.float32), 2, axis=-1)
    return (activate(gate_TF, activation) * up_TF).astype(gate_up_T2F.dtype)


def activate(x: jax.Array, activation: GateActivation) -> jax.Array:
    """The activation function; the approximate gelu is that of Hendrycks and Gimpel (2016)."""
    match activation:
        case "silu":
            return jax.nn.silu(x)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
