"""Rows of sparse layers that devices split and exchange: equal to what one device computes, wherever the rows go."""

import re
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.layers.moe import SparseMLP
from jaxinfer.models.config import MoEConfig
from pallas_kernels.select import select_ops
from sharding.axes import AxisRules
from sharding.layout import ONE_DEVICE, WHOLE, Layout
from sharding.mesh import make_layout
from sharding.rows import RowExchange

OPS = select_ops("reference", "cpu", strict=True)
D, F, E, T = 16, 8, 8, 32
COLLECTIVES = ("ragged_all_to_all", "all_to_all", "all_gather", "reduce_scatter", "all_reduce")


def sparse_mlp(rules: AxisRules | None, chosen: int, shared: bool) -> SparseMLP:
    moe = MoEConfig(E, chosen, F, True, (True,), shared_size=16 if shared else 0)
    ops = OPS if rules is None else replace(OPS, shards=rules)
    return SparseMLP(moe, D, "silu", bias=False, ops=ops, param_dtype=jnp.dtype(jnp.float32))


class Programs:
    """The layer on several devices; all programs of a layout are one compilation, whatever the router's weights."""

    def __init__(self, layout: Layout, chosen: int, shared: bool) -> None:
        self.layout, self.chosen, self.shared = layout, chosen, shared
        rules = None if layout.num_devices == 1 else layout.rules
        module = nnx.eval_shape(lambda: sparse_mlp(rules, chosen, shared))
        graphdef, state = nnx.split(module)
        flat = list(nnx.to_flat_state(state))
        self.axes = [param.get_metadata()["logical_axes"] for _, param in flat]
        keys = [key for key, _ in flat]

        def run(
            leaves: tuple[jax.Array, ...], x_TD: jax.Array, valid_T: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            merged = nnx.merge(graphdef, nnx.from_flat_state(list(zip(keys, leaves))))
            assert isinstance(merged, SparseMLP)
            shards = merged.ops.shards
            if not shards.splits(len(x_TD)):
                return merged(x_TD, valid_T)
            y_RD, rows_E = merged.exchanged(shards.own_rows(x_TD), shards.own_rows(valid_T))
            return shards.join_rows(y_RD), rows_E

        specs: tuple[PartitionSpec, ...] = tuple(layout.rules.spec(axes) for axes in self.axes)
        self.run = jax.jit(layout.spread(run, (specs, WHOLE, WHOLE), (WHOLE, WHOLE)))
        whole = nnx.eval_shape(lambda: sparse_mlp(None, chosen, shared))
        self.shapes = [param.get_value().shape for _, param in nnx.to_flat_state(nnx.split(whole)[1])]
        self.names = [".".join(map(str, key)) for key in keys]

    def __call__(
        self, weights: dict[str, np.ndarray], x_TD: np.ndarray, valid_T: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        leaves = tuple(self.layout.place(weights[name], axes) for name, axes in zip(self.names, self.axes))
        y_TD, rows_E = self.run(leaves, self.layout.bring(x_TD), self.layout.bring(valid_T))
        return np.asarray(y_TD), np.asarray(rows_E)

    def weights(self, seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {
            name: (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
            for name, shape in zip(self.names, self.shapes)
        }


@cache
def programs(tensor: int, expert: int, chosen: int = 2, shared: bool = False) -> Programs:
    exchange_from = T if expert > 1 else None
    layout = (
        ONE_DEVICE
        if tensor * expert == 1
        else make_layout(jax.devices(), tensor, expert, exchange_from=exchange_from)
    )
    return Programs(layout, chosen, shared)


alone = partial(programs, 1, 1)
QUICK = [(1, 4, 2, False), (2, 2, 3, True)]
SLOW = [(1, 2, 1, False), (1, 8, 8, True), (2, 4, 1, True), (4, 2, 8, False)]


def check(
    case: tuple[int, int, int, bool], weights: dict[str, np.ndarray], x_TD: np.ndarray, valid_T: np.ndarray
) -> np.ndarray:
    tensor, expert, chosen, shared = case
    y_TD, rows_E = programs(tensor, expert, chosen, shared)(weights, x_TD, valid_T)
    expected_TD, expected_E = alone(chosen, shared)(weights, x_TD, valid_T)
    np.testing.assert_allclose(y_TD, expected_TD, atol=1e-5)
    np.testing.assert_array_equal(rows_E, expected_E)
    return rows_E


CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.feature("expert parallel", "tensor parallel", "token exchange")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_as_on_one_device_with_any_padding(case: tuple[int, int, int, bool]) -> None:
    for seed, valid in enumerate((T, T - 1, T // 2, 1, 0)):
        weights = alone(*case[2:]).weights(seed)
        x_TD = np.random.default_rng(10 + seed).standard_normal((T, D)).astype(np.float32)
        x_TD[valid:] = [np.nan, 1e30, 0.0][seed % 3]
        rows_E = check(case, weights, x_TD, np.arange(T) < valid)
        assert rows_E.sum() == valid * case[2]


@pytest.mark.feature("expert parallel", "tensor parallel", "token exchange")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_token_is_dropped_where_all_choose_the_same_expert(case: tuple[int, int, int, bool]) -> None:
    """The most uneven routing: a device gets every row of every other one."""
    for expert in (0, E - 1):
        weights = alone(*case[2:]).weights(expert)
        x_TD = np.random.default_rng(expert).uniform(0.5, 1.0, (T, D)).astype(np.float32)
        weights["router.weight"][expert] = 1.0
        rows_E = check(case, weights, x_TD, np.ones(T, bool))
        assert rows_E[expert] == T


def documented_ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str,
) -> jax.Array:
    """What JAX's documentation says of it, with everything sent to everybody."""
    me = lax.axis_index(axis_name)
    sources = [operand, input_offsets, send_sizes, output_offsets]
    data_SXD, first_SN, size_SN, target_SN = (lax.all_gather(x, axis_name) for x in sources)
    place_X = jnp.arange(output.shape[0])
    for source, data_XD in enumerate(data_SXD):
        size, start = size_SN[source, me], target_SN[source, me]
        checked = jnp.where(size == recv_sizes[source], size, -1)  # they have to agree
        here_X = (place_X >= start) & (place_X < start + checked)
        output = jnp.where(here_X[:, None], data_XD[place_X - start + first_SN[source, me]], output)
    return output


@pytest.mark.feature("expert parallel", "token exchange")
def test_ragged_blocks_arrive_where_full_blocks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA has the ragged form for GPUs only; here it is played by what its documentation says."""
    monkeypatch.setattr(lax, "ragged_all_to_all", documented_ragged_all_to_all)
    dense = make_layout(jax.devices(), 1, 4, exchange_from=T)
    ragged = replace(dense, rules=replace(dense.rules, row_exchange=RowExchange(T, ragged=True)))
    layer = Programs(ragged, 2, shared=False)
    weights = layer.weights(0)
    x_TD = np.random.default_rng(0).standard_normal((T, D)).astype(np.float32)
    valid_T = np.arange(T) < T - 3
    for found, expected in zip(layer(weights, x_TD, valid_T), alone(2, False)(weights, x_TD, valid_T)):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.feature("expert parallel", "token exchange")
def test_gpus_get_ragged_exchanges_and_no_other_copies() -> None:
    """What XLA is given for GPUs: two ragged exchanges, the routing of all rows, and the sum of a shared expert."""
    layout = make_layout(jax.devices(), 1, 4, exchange_from=T)
    ragged = replace(layout, rules=replace(layout.rules, row_exchange=RowExchange(T, ragged=True)))
    layer = Programs(ragged, 2, shared=True)
    weights = layer.weights(0)
    leaves = tuple(layout.place(weights[name], axes) for name, axes in zip(layer.names, layer.axes))
    lowered = layer.run.trace(
        leaves, layout.bring(np.zeros((T, D), np.float32)), layout.bring(np.ones(T, bool))
    ).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    found = {name: len(re.findall(rf"\b{name}\b", text)) for name in COLLECTIVES}
    # Rows of the shared expert, weights and ids of the routing, and here also the output.
    assert found == {
        "ragged_all_to_all": 2,
        "all_to_all": 0,
        "all_gather": 4,
        "reduce_scatter": 1,
        "all_reduce": 0,
    }


def test_small_programs_and_odd_ones_do_not_split() -> None:
    rules = make_layout(jax.devices(), 2, 3, exchange_from=T).rules
    assert [rows for rows in range(T - 6, T + 8) if rules.splits(rows)] == [33, 36, 39]
    assert not make_layout(jax.devices(), 2, 3).rules.splits(33)
    assert not make_layout(jax.devices(), 2, 1, exchange_from=T).rules.splits(32)
