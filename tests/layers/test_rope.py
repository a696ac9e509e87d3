"""Rotary embeddings against ``transformers`` and against float64."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from jaxinfer.layers.rope import frequencies, rope_tables
from jaxinfer.models.config import RopeConfig
from jaxinfer.models.hf_rope import parse_ropes
from pallas_kernels.rope_kv_write.reference import rotate

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32768,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHORT, LONG = [1.0 + 0.01 * i for i in range(32)], [1.0 + 0.5 * i for i in range(32)]
LONGROPE = {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 4096}
YARN = {"factor": 4.0, "original_max_position_embeddings": 8192}
SPECS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "default_base": ({"rope_theta": 500000.0}, {}),
    "default_partial": ({}, {"partial_rotary_factor": 0.5}),
    "default_head_dim": ({"head_dim": 80}, {}),
    "linear": ({}, {"rope_type": "linear", "factor": 2.0}),
    "dynamic": ({}, {"rope_type": "dynamic", "factor": 6.0}),
    "llama3": ({"rope_theta": 500000.0}, {"rope_type": "llama3", **LLAMA3}),
    "yarn": ({}, {"rope_type": "yarn", **YARN}),
    "yarn_attention_factor": ({}, {"rope_type": "yarn", **YARN, "attention_factor": 1.7}),
    "yarn_mscale": ({}, {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.3}),
    "yarn_mscale_alone": ({}, {"rope_type": "yarn", **YARN, "mscale": 0.7}),
    "yarn_betas": ({}, {"rope_type": "yarn", **YARN, "beta_fast": 24.0, "beta_slow": 2.0}),
    "yarn_not_truncated": ({}, {"rope_type": "yarn", **YARN, "truncate": False}),
    "yarn_partial": ({}, {"rope_type": "yarn", **YARN, "partial_rotary_factor": 0.5}),
    "longrope_short": ({"served": 4096}, {"rope_type": "longrope", **LONGROPE}),
    "longrope_long": ({"served": 4097}, {"rope_type": "longrope", **LONGROPE}),
    "longrope_factor": ({}, {"rope_type": "longrope", **LONGROPE, "factor": 32.0}),
    "longrope_attention_factor": ({}, {"rope_type": "longrope", **LONGROPE, "attention_factor": 1.1}),
}


def parsed(outer: dict[str, Any], inner: dict[str, Any]) -> RopeConfig:
    return parse_ropes({**BASE, **outer, "rope_scaling": inner})[0]


def expected_frequencies(
    outer: dict[str, Any], inner: dict[str, Any], length: int
) -> tuple[np.ndarray, float]:
    inner = {"rope_type": "default", "rope_theta": 10000.0, **inner}
    if "rope_theta" in outer:
        inner["rope_theta"] = outer["rope_theta"]
    config = LlamaConfig(**BASE, head_dim=outer.get("head_dim"), rope_parameters=inner)
    if inner["rope_type"] == "default":
        frequency, factor = Phi3RotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequency, factor = ROPE_INIT_FUNCTIONS[inner["rope_type"]](
            config, torch.device("cpu"), seq_len=length
        )
    return frequency.numpy(), factor


@pytest.mark.parametrize("case", SPECS)
def test_lod_04_rope_types(case):
    outer, inner = SPECS[case]
    outer = dict(outer)
    length = outer.pop("served", BASE["max_position_embeddings"])
    actual, factor = frequencies(parsed(outer, inner), length)
    expected, expected_factor = expected_frequencies(outer, inner, length)
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=0)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
    assert factor == pytest.approx(expected_factor, abs=1e-6)


@pytest.mark.parametrize("case", SPECS)
def test_lod_04_tables_equal_float64(case):
    outer, inner = SPECS[case]
    outer = dict(outer)
    length = outer.pop("served", BASE["max_position_embeddings"])
    rope = parsed(outer, inner)
    positions = np.array([0, 1, 1000, 8192, 100000])
    cos, sin = rope_tables(jnp.asarray(positions, jnp.int32), rope, length)
    assert cos.dtype == sin.dtype == jnp.float32
    frequency, factor = frequencies(rope, length)
    angle = positions[:, None] * frequency
    np.testing.assert_allclose(cos, np.cos(angle) * factor, atol=2e-4)
    np.testing.assert_allclose(sin, np.sin(angle) * factor, atol=2e-4)


@pytest.mark.parametrize("case", SPECS)
def test_lod_04_scores_depend_on_distance_only(case):
    outer, inner = SPECS[case]
    outer = dict(outer)
    length = outer.pop("served", BASE["max_position_embeddings"])
    rope = parsed(outer, inner)
    rng = np.random.default_rng(0)
    width = outer.get("head_dim", 64)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, width)), jnp.float32) for _ in range(2))
    starts = np.array([0, 1, 7, 1000, 8192, 100000])

    def rotated(x, offset):
        tables = rope_tables(jnp.asarray(starts + offset, jnp.int32), rope, length)
        return np.asarray(rotate(jnp.tile(x, (len(starts), 1, 1)), *tables), np.float64)

    for distance in (0, 1, 33):
        scores = (rotated(q, distance) * rotated(k, 0)).sum((1, 2))
        np.testing.assert_allclose(scores, scores[0], atol=2e-5)
        assert scores[0] != pytest.approx((rotated(q, distance + 2) * rotated(k, 0)).sum((1, 2))[0], abs=1e-3)


def test_partial_rotation_leaves_the_rest():
    rope = parsed({}, {"partial_rotary_factor": 0.5})
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 64)), jnp.float32)
    y = rotate(x, *rope_tables(jnp.arange(5, 8), rope, 64))
    np.testing.assert_array_equal(y[..., 32:], x[..., 32:])
    assert not np.allclose(y[..., :32], x[..., :32])


DYNAMIC = {"max_position_embeddings": 32}


@pytest.mark.parametrize("length", [8, 31, 32])
def test_lod_05_dynamic_equals_default_up_to_the_original_length(length):
    """Pinned: the length of the dynamic type is the longest sequence that is served (``max_model_len``)."""
    dynamic = parsed(DYNAMIC, {"rope_type": "dynamic", "factor": 6.0})
    default = parsed(DYNAMIC, {})
    np.testing.assert_array_equal(frequencies(dynamic, length)[0], frequencies(default, length)[0])


@pytest.mark.parametrize("length", [33, 64, 200])
def test_lod_05_dynamic_equals_the_reference_of_that_length(length):
    config = LlamaConfig(
        **{**BASE, **DYNAMIC}, rope_parameters={"rope_type": "dynamic", "factor": 6.0, "rope_theta": 10000.0}
    )
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=length)
    actual, factor = frequencies(parsed(DYNAMIC, {"rope_type": "dynamic", "factor": 6.0}), length)
    np.testing.assert_allclose(actual, expected.numpy(), rtol=2e-6)
    assert factor == 1.0
    assert actual[0] == 1.0, "the fastest pair keeps its frequency: positions are not multiplied"
    assert actual[-1] < frequencies(parsed(DYNAMIC, {}), length)[0][-1]


@pytest.mark.parametrize("length", [8, 33, 64])
def test_lod_05_linear_divides_positions_and_keeps_the_base(length):
    linear, _ = frequencies(parsed(DYNAMIC, {"rope_type": "linear", "factor": 6.0}), length)
    np.testing.assert_allclose(linear * 6.0, frequencies(parsed(DYNAMIC, {}), length)[0], rtol=1e-12)
