"""Sparse MLP against a loop over tokens and experts, and its treatment of padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.layers.moe import SparseMLP
from jaxinfer.models.config import MoEConfig
from pallas_kernels.select import select_ops

OPS = select_ops("reference", "cpu", strict=True)
D, F, E = 16, 12, 5


def layer(experts_per_token: int, norm_topk: bool) -> SparseMLP:
    moe = MoEConfig(E, experts_per_token, F, norm_topk, (True,))
    module = SparseMLP(moe, D, "silu", bias=False, ops=OPS, param_dtype=jnp.dtype(jnp.float32))
    rng = np.random.default_rng(0)
    module.router.weight[...] = jnp.asarray(rng.normal(size=(E, D)), jnp.float32)
    module.experts.gate_up[...] = jnp.asarray(rng.normal(size=(E, 2 * F, D)) / 4, jnp.float32)
    module.experts.down[...] = jnp.asarray(rng.normal(size=(E, D, F)) / 3, jnp.float32)
    return module


@nnx.jit
def run(module: SparseMLP, x_TD: jax.Array, valid_T: jax.Array) -> jax.Array:
    return module(x_TD, valid_T)[0]


def by_hand(module: SparseMLP, x_TD: np.ndarray) -> np.ndarray:
    router, up_E2FD, down_EDF = (
        np.asarray(w[...], np.float64)
        for w in (module.router.weight, module.experts.gate_up, module.experts.down)
    )
    out = np.zeros_like(x_TD, np.float64)
    for t, x_D in enumerate(x_TD.astype(np.float64)):
        logits_E = router @ x_D
        probs_E = np.exp(logits_E - logits_E.max())
        probs_E /= probs_E.sum()
        best = np.argsort(-probs_E)[: module.moe.experts_per_token]
        total = probs_E[best].sum() if module.moe.norm_topk else 1.0
        for e in best:
            gate_F, up_F = np.split(up_E2FD[e] @ x_D, 2)
            out[t] += probs_E[e] / total * (down_EDF[e] @ (gate_F / (1 + np.exp(-gate_F)) * up_F))
    return out


@pytest.mark.parametrize("norm_topk", [True, False])
@pytest.mark.parametrize("experts_per_token", [1, 2, E])
def test_equals_a_loop(experts_per_token, norm_topk):
    module = layer(experts_per_token, norm_topk)
    x_TD = np.random.default_rng(1).normal(size=(9, D)).astype(np.float32)
    actual = run(module, jnp.asarray(x_TD), jnp.ones(9, bool))
    np.testing.assert_allclose(actual, by_hand(module, x_TD), atol=1e-5)


@pytest.mark.parametrize("rubbish", [0.0, 1e30, np.nan, np.inf])
def test_padding_does_not_disturb(rubbish):
    module = layer(2, True)
    x_TD = jnp.asarray(np.random.default_rng(2).normal(size=(8, D)), jnp.float32).at[5:].set(rubbish)
    valid_T = jnp.arange(8) < 5
    actual = run(module, x_TD, valid_T)
    np.testing.assert_allclose(actual[:5], run(module, x_TD[:5], valid_T[:5]), atol=1e-6)
    np.testing.assert_array_equal(actual[5:], 0.0)


def test_tokens_of_experts_are_counted_and_padding_is_not():
    module = layer(2, True)
    x_TD = np.random.default_rng(4).normal(size=(8, D)).astype(np.float32)
    logits_TE = x_TD[:5] @ np.asarray(module.router.weight[...]).T
    chosen = np.argsort(-logits_TE, axis=1)[:, :2]
    _, rows_E = module(jnp.asarray(x_TD), jnp.arange(8) < 5)
    np.testing.assert_array_equal(rows_E, np.bincount(chosen.ravel(), minlength=E))


def test_all_tokens_on_one_expert():
    module = layer(1, True)
    x_TD = np.tile(np.random.default_rng(3).normal(size=(1, D)), (7, 1)).astype(np.float32)
    actual = run(module, jnp.asarray(x_TD), jnp.ones(7, bool))
    np.testing.assert_allclose(actual, by_hand(module, x_TD), atol=1e-5)
