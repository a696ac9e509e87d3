"""Gated MLP (Shazeer, 2020)."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.layers.linear import Linear
from jaxinfer.models.config import Activation
from pallas_kernels.ops import Ops
from sharding.axes import Part


def gate_up_axes(name: str, intermediate_size: int) -> tuple[tuple[Part, ...], str]:
    """Axes of the weight of gate and up, one below the other: each device holds its share of either."""
    part = Part(name, intermediate_size)
    return (part, part), "embed"


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
        self.ops = ops
        self.gate_up = Linear(
            hidden_size,
            2 * intermediate_size,
            axes=gate_up_axes("mlp", intermediate_size),
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

    def __call__(self, x_TD: jax.Array, split_rows: bool = False) -> jax.Array:
        return self.down(self.ops.gate(self.gate_up(x_TD), self.activation), split_rows=split_rows)
