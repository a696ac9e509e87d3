"""Gated MLP (Shazeer, 2020)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.layers.linear import Linear
from jaxinfer.models.config import Activation
from pallas_kernels.ops import Ops

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


def gate(gate_up_T2F: jax.Array, activation: Activation) -> jax.Array:
    """``activation(gate) * up`` of the halves of the last axis: ``[T, F]``, computed in float32."""
    gate_TF, up_TF = jnp.split(gate_up_T2F.astype(jnp.float32), 2, axis=-1)
    return (ACTIVATIONS[activation](gate_TF) * up_TF).astype(gate_up_T2F.dtype)


class MLP(nnx.Module):
    """``down(activation(gate(x)) * up(x))``, with gate and up in one projection."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation,
        *,
        bias: bool,
        ops: Ops,
        param_dtype: jnp.dtype,
    ) -> None:
        self.activation = activation
        self.gate_up = Linear(
            hidden_size,
            2 * intermediate_size,
            axes=("gate_up", "embed"),
            bias=bias,
            ops=ops,
            param_dtype=param_dtype,
        )
        self.down = Linear(
            intermediate_size,
            hidden_size,
            axes=("embed", "mlp"),
            bias=bias,
            ops=ops,
            param_dtype=param_dtype,
        )

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        return self.down(gate(self.gate_up(x_TD), self.activation))
