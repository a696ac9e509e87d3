"""Sparse MLP: tokens are sorted by expert, so each expert multiplies one block of rows."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.layers.linear import Linear
from jaxinfer.models.config import Activation, MoEConfig
from pallas_kernels.ops import Ops


class Experts(nnx.Module):
    """Weights of all experts, ``[E, out, in]``, gate and up in one."""

    def __init__(self, moe: MoEConfig, hidden_size: int, param_dtype: jnp.dtype) -> None:
        E, F, D = moe.num_experts, moe.intermediate_size, hidden_size
        self.gate_up = nnx.Param(
            jnp.zeros((E, 2 * F, D), param_dtype), logical_axes=("experts", "gate_up", "embed")
        )
        self.down = nnx.Param(jnp.zeros((E, D, F), param_dtype), logical_axes=("experts", "embed", "mlp"))


class SparseMLP(nnx.Module):
    """Mixture of experts with softmax routing to the ``experts_per_token`` best (Shazeer et al., 2017)."""

    def __init__(
        self, moe: MoEConfig, hidden_size: int, activation: Activation, *, ops: Ops, param_dtype: jnp.dtype
    ) -> None:
        self.moe = moe
        self.activation = activation
        self.ops = ops
        # In float32, because a rounding to bfloat16 can flip a close choice between experts.
        self.router = Linear(
            hidden_size,
            moe.num_experts,
            axes=(None, "embed"),
            bias=False,
            ops=ops,
            param_dtype=jnp.dtype(jnp.float32),
            packable=False,
        )
        self.experts = Experts(moe, hidden_size, param_dtype)

    def route(self, x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights (float32) and ids (int32) of the chosen experts, ``[T, X]`` each."""
        probs_TE = jax.nn.softmax(self.router(x_TD.astype(jnp.float32)), axis=-1)
        weight_TX, expert_TX = jax.lax.top_k(probs_TE, self.moe.experts_per_token)
        if self.moe.norm_topk:
            weight_TX = weight_TX / jnp.sum(weight_TX, axis=-1, keepdims=True)
        return weight_TX, expert_TX

    def __call__(self, x_TD: jax.Array, valid_T: jax.Array) -> jax.Array:
        """Output ``[T, D]``; rows where ``valid_T`` is False reach no expert and give 0."""
        T, D = x_TD.shape
        E, X = self.moe.num_experts, self.moe.experts_per_token
        weight_TX, expert_TX = self.route(x_TD)
        # Padding goes to an expert that does not exist: it sorts last and belongs to no group.
        expert_A = jnp.where(valid_T[:, None], expert_TX, E).reshape(T * X)
        order_A = jnp.argsort(expert_A, stable=True)
        sizes_E = jnp.zeros((E,), jnp.int32).at[expert_A].add(1, mode="drop")

        h_AF = self.ops.grouped_matmul(x_TD[order_A // X], self.experts.gate_up[...], sizes_E)
        y_AD = self.ops.grouped_matmul(self.ops.gate(h_AF, self.activation), self.experts.down[...], sizes_E)

        place_A = jnp.zeros_like(order_A).at[order_A].set(jnp.arange(T * X, dtype=order_A.dtype))
        y_TXD = y_AD[place_A].reshape(T, X, D).astype(jnp.float32)
        # ``where``, because the routing weights of padding may be NaN.
        weight_TX = jnp.where(valid_T[:, None], weight_TX, 0.0)
        return jnp.sum(y_TXD * weight_TX[..., None], axis=1).astype(x_TD.dtype)
