"""Norm, gated activation, linear and embedding layers against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

from jaxinfer.layers.linear import Embedding, Linear
from jaxinfer.layers.norm import RMSNorm
from pallas_kernels.gate.reference import gate
from pallas_kernels.select import select_ops
from tests.support.compiling import OPTIMIZED

OPS = select_ops("reference", "cpu", strict=True)
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norm(offset, dtype):
    """Computed in float32 with one rounding at the end; small and large values lose nothing."""
    module = RMSNorm(32, 1e-6, offset, "embed")
    weight = RNG.normal(size=32)
    module.weight[...] = jnp.asarray(weight, jnp.float32)
    x = jnp.asarray(RNG.normal(size=(4, 2, 32)) * np.array([1e-3, 1, 1e3, 1e6])[:, None, None], dtype)
    x64 = np.asarray(x, np.float64)
    expected = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * (weight + offset)
    actual = module(x)
    assert actual.dtype == x.dtype
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=2.0**-8 if dtype == "bfloat16" else 1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("ours", "theirs"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("gelu", "gelu")]
)
def test_activations_equal_transformers(ours, theirs):
    x = RNG.normal(size=(5, 24)).astype(np.float32) * 3
    expected = ACT2FN[theirs](torch.tensor(x[:, :12])).numpy() * x[:, 12:]
    # As served: XLA's older emitters, which compile faster, have a tanh of their own.
    served = jax.jit(gate, static_argnums=1, compiler_options=OPTIMIZED)
    # Outputs reach 12; XLA's erf is 3e-6 off on processors with AVX-512, and less on others.
    np.testing.assert_allclose(served(jnp.asarray(x), ours), expected, atol=4e-6)


def test_linear_has_bias_and_out_dtype():
    module = Linear(6, 4, axes=("mlp", "embed"), bias=True, ops=OPS, param_dtype=jnp.dtype(jnp.bfloat16))
    assert module.bias is not None
    module.weight[...] = jnp.asarray(RNG.normal(size=(4, 6)), jnp.bfloat16)
    module.bias[...] = jnp.asarray(RNG.normal(size=4), jnp.bfloat16)
    x = jnp.asarray(RNG.normal(size=(3, 6)), jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(module.weight[...], np.float64).T
    exact += np.asarray(module.bias[...], np.float64)
    assert module(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(module(x, out_dtype=jnp.dtype(jnp.float32)), exact, atol=1e-5)


def test_embedding_scale_is_rounded_to_the_activation_dtype():
    """sqrt(3072) = 55.4256 is 55.5 in bfloat16, which Gemma was trained with."""
    module = Embedding(3, 2, ops=OPS, param_dtype=jnp.dtype(jnp.float32))
    module.weight[...] = jnp.ones((3, 2), jnp.float32)
    ids = jnp.array([0, 2])
    np.testing.assert_array_equal(module(ids, 3072**0.5, jnp.dtype(jnp.bfloat16)).astype(jnp.float32), 55.5)
    np.testing.assert_allclose(module(ids, 3072**0.5, jnp.dtype(jnp.float32)), 55.425625, rtol=1e-6)
