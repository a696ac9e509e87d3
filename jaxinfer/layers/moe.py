"""Sparse MLP: tokens are sorted by expert, so each expert multiplies one block of rows."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.layers.expert_routes import Routes
from jaxinfer.layers.linear import Linear
from jaxinfer.layers.mlp import MLP, gate_up_axes
from jaxinfer.models.config import Activation, ExpertGroups, MoEConfig
from pallas_kernels.ops import Ops

SMALLEST_SUM = 1e-20


class Experts(nnx.Module):
    """Weights of a device's experts, ``[E, out, in]``, gate and up in one."""

    def __init__(self, moe: MoEConfig, hidden_size: int, *, ops: Ops, param_dtype: jnp.dtype) -> None:
        D = hidden_size
        E = ops.shards.local("experts", moe.num_experts)
        F = ops.shards.local("expert_mlp", moe.intermediate_size)
        self.gate_up = nnx.Param(
            jnp.zeros((E, 2 * F, D), param_dtype),
            logical_axes=("experts", *gate_up_axes("expert_mlp", moe.intermediate_size)),
        )
        self.down = nnx.Param(
            jnp.zeros((E, D, F), param_dtype), logical_axes=("experts", "embed", "expert_mlp")
        )


class SparseMLP(nnx.Module):
    """Mixture of experts with routing to the ``experts_per_token`` best (Shazeer et al., 2017), if so configured with
    groups, a bias of the choice and a shared expert (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    Devices that share the experts all route all tokens; each computes what its own experts add, and the sum of that is
    the output of all. The shared expert is an MLP like any other: it adds its own sum, once. In programs of many rows
    they split the rows instead, and exchange them (``exchanged``).

    Args:
        bias: whether the shared expert has biases.
    """

    def __init__(
        self,
        moe: MoEConfig,
        hidden_size: int,
        activation: Activation,
        *,
        bias: bool,
        ops: Ops,
        param_dtype: jnp.dtype,
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
        self.choice_bias = (
            nnx.Param(jnp.zeros((moe.num_experts,), jnp.float32), logical_axes=(None,))
            if moe.choice_bias
            else None
        )
        self.experts = Experts(moe, hidden_size, ops=ops, param_dtype=param_dtype)
        self.shared = (
            MLP(hidden_size, moe.shared_size, activation, bias=bias, ops=ops, param_dtype=param_dtype)
            if moe.shared_size
            else None
        )

    def route(self, x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights (float32) and ids (int32) of the chosen experts, ``[T, X]`` each."""
        moe = self.moe
        logits_TE = self.router(x_TD.astype(jnp.float32))
        score_TE = (
            jax.nn.softmax(logits_TE, axis=-1) if moe.scoring == "softmax" else jax.nn.sigmoid(logits_TE)
        )
        choice_TE = score_TE if self.choice_bias is None else score_TE + self.choice_bias[...]
        if moe.groups is not None:
            choice_TE = _within_groups(choice_TE, moe.groups)
        weight_TX, expert_TX = jax.lax.top_k(choice_TE, moe.experts_per_token)
        if self.choice_bias is not None:
            weight_TX = jnp.take_along_axis(score_TE, expert_TX, axis=-1)
        if moe.norm_topk:
            # Sigmoids may all be 0.
            weight_TX = weight_TX / jnp.maximum(jnp.sum(weight_TX, axis=-1, keepdims=True), SMALLEST_SUM)
        return weight_TX * moe.weight_scale, expert_TX

    def __call__(self, x_TD: jax.Array, valid_T: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Output ``[T, D]``, and the rows that each of all experts got, int32 ``[E]``.

        Rows where ``valid_T`` is False reach no expert and give 0.
        """
        weight_TX, expert_TX = self._route_valid(x_TD, valid_T)
        rows_E = self._count(expert_TX)
        y_TD = self._own_experts(x_TD, weight_TX, expert_TX, rows_E)
        y_TD = self.ops.shards.sum(y_TD, "experts", "expert_mlp")
        if self.shared is not None:
            y_TD = y_TD + jnp.where(valid_T[:, None], self.shared(x_TD), 0)
        return y_TD, rows_E

    def exchanged(self, x_RD: jax.Array, valid_R: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As a call, for the rows of this device: it sends them to the devices of their experts, a row at most once to
        each, and gets back the weighted sums of what these experts make of them.
        """
        shards = self.ops.shards
        weight_RX, expert_RX = self._route_valid(x_RD, valid_R)
        expert_TX, weight_TX = shards.join_rows(expert_RX), shards.join_rows(weight_RX)
        rows_E = self._count(expert_TX)
        routes = Routes.of(expert_TX // self.experts.down.shape[0], shards.size("experts"))
        me = shards.index("experts")
        there, back = routes.sent(me), routes.received(me)
        arrived_TD = shards.exchange_rows(x_RD[there.row_T], there.count_N, back.count_N)
        chosen_TX = jnp.where(back.counts_T[:, None], expert_TX[back.row_T], self.moe.num_experts)
        y_TD = self._own_experts(arrived_TD, weight_TX[back.row_T], chosen_TX, rows_E)
        y_TD = shards.exchange_rows(y_TD, back.count_N, there.count_N)
        y_RD = shards.sum(routes.gather(y_TD, me, self.moe.experts_per_token), "expert_mlp")
        if self.shared is not None:
            # Needs nothing of the exchange, so it can run while rows travel.
            y_RD = y_RD + jnp.where(valid_R[:, None], self.shared(shards.join_rows(x_RD), split_rows=True), 0)
        return y_RD, rows_E

    def _route_valid(self, x_TD: jax.Array, valid_T: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As ``route``; rows that are not valid choose an expert that does not exist."""
        weight_TX, expert_TX = self.route(x_TD)
        return weight_TX, jnp.where(valid_T[:, None], expert_TX, self.moe.num_experts)

    def _own_experts(
        self, x_TD: jax.Array, weight_TX: jax.Array, expert_TX: jax.Array, rows_E: jax.Array
    ) -> jax.Array:
        """What this device's experts, or its shares of them, add to the output ``[T, D]``.

        Args:
            x_TD: all rows that chose them, and maybe others.
            rows_E: rows that each of all experts gets.
        """
        T, D = x_TD.shape
        E, X = self.experts.down.shape[0], self.moe.experts_per_token
        first = self.ops.shards.index("experts") * E
        sizes_E = jax.lax.dynamic_slice_in_dim(rows_E, first, E)
        expert_TX = expert_TX - first
        mine_TX = (expert_TX >= 0) & (expert_TX < E)
        # Padding, and experts of other devices, go to one that does not exist: it sorts last and belongs to no group.
        expert_A = jnp.where(mine_TX, expert_TX, E).reshape(T * X)
        order_A = jnp.argsort(expert_A, stable=True)

        h_AF = self.ops.grouped_matmul(x_TD[order_A // X], self.experts.gate_up[...], sizes_E)
        y_AD = self.ops.grouped_matmul(self.ops.gate(h_AF, self.activation), self.experts.down[...], sizes_E)

        place_A = jnp.zeros_like(order_A).at[order_A].set(jnp.arange(T * X, dtype=order_A.dtype))
        y_TXD = y_AD[place_A].reshape(T, X, D).astype(jnp.float32)
        # ``where``, because the routing weights of padding may be NaN.
        weight_TX = jnp.where(mine_TX, weight_TX, 0.0)
        return jnp.sum(y_TXD * weight_TX[..., None], axis=1).astype(x_TD.dtype)

    def _count(self, expert_TX: jax.Array) -> jax.Array:
        """Rows of each of all experts, int32 ``[E]``."""
        E = self.moe.num_experts
        return jnp.zeros((E,), jnp.int32).at[expert_TX.reshape(-1)].add(1, mode="drop")


def _within_groups(choice_TE: jax.Array, groups: ExpertGroups) -> jax.Array:
    """The scores with -inf for all experts outside of the best groups of each token."""
    T, E = choice_TE.shape
    choice_TGe = choice_TE.reshape(T, groups.count, E // groups.count)
    best_TG = jnp.sum(jax.lax.top_k(choice_TGe, groups.best)[0], axis=-1)
    _, chosen_TX = jax.lax.top_k(best_TG, groups.chosen)
    allowed_TG = (chosen_TX[:, :, None] == jnp.arange(groups.count)).any(axis=1)
    return jnp.where(allowed_TG[:, :, None], choice_TGe, -jnp.inf).reshape(T, E)
