"""Spellings of rotary embeddings in ``config.json``, and what is refused."""

from typing import Any

import pytest

from jaxinfer.models.config import RopeConfig
from jaxinfer.models.hf_rope import parse_ropes
from jaxinfer.models.registry import family

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
}


def rope(**fields: Any) -> RopeConfig:
    ropes = parse_ropes({**BASE, **fields})
    assert len(set(ropes)) == 1
    assert len(ropes) == 3
    return ropes[0]


def test_lod_04_spellings_agree():
    expected = rope(rope_theta=500.0, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert expected.theta == 500.0
    assert expected.factor == 2.0
    for other in (
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
        {"rope_theta": 9.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
        {"rope_theta": 500.0, "rope_scaling": None, "rope_parameters": {"type": "linear", "factor": 2.0}},
    ):
        assert rope(**other) == expected


def test_lod_04_null_and_absent_mean_default():
    assert rope(rope_scaling=None) == rope() == rope(rope_parameters={"rope_type": "default"})
    assert rope().theta == 10000.0
    assert parse_ropes(BASE, theta=7.0)[0].theta == 7.0


def test_lod_04_original_length_inside_or_outside():
    """Pinned: the outer value wins, as in ``transformers``; without any it is the model's context length."""
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert rope(rope_scaling=yarn).original_max_position == 64
    assert rope(rope_scaling={**yarn, "original_max_position_embeddings": 16}).original_max_position == 16
    outside = rope(
        rope_scaling={**yarn, "original_max_position_embeddings": 16}, original_max_position_embeddings=32
    )
    assert outside.original_max_position == 32


def test_lod_04_longrope_by_its_first_name_and_factor_from_the_lengths():
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    su = rope(rope_scaling={"type": "su", **factors}, original_max_position_embeddings=16)
    assert su.type == "longrope"
    assert su.factor == 4.0
    hf = {**BASE, "rope_scaling": {"type": "yarn", **factors}, "original_max_position_embeddings": 16}
    assert family("Phi3ForCausalLM").parse(hf).ropes[0] == su, "Phi-3 calls it yarn too"


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "foo", "factor": 2.0}, ["foo", "linear", "llama3", "yarn", "longrope"]),
        ({"type": "mrope"}, ["mrope"]),
        ({"rope_type": "linear"}, ["linear", "factor"]),
        ({"rope_type": "dynamic", "factor": None}, ["dynamic", "factor"]),
        ({"rope_type": "yarn"}, ["yarn", "factor"]),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, ["llama3", "low_freq_factor"]),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8}, ["longrope", "long_factor"]),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7},
            ["long_factor", "8"],
        ),
        ({"rope_type": "linear", "factor": "two"}, ["factor", "two"]),
        ({"rope_type": "linear", "factor": -1.0}, ["factor", "-1.0"]),
        ({"partial_rotary_factor": 0.2}, ["partial_rotary_factor", "even"]),
        ({"full_attention": {}, "sliding_attention": {}}, ["per layer type"]),
        ("yarn", ["rope_scaling", "yarn"]),
    ],
)
def test_lod_04_refused_at_startup(scaling, words):
    with pytest.raises(ValueError, match=r"config\.json: ") as error:
        rope(rope_scaling=scaling)
    for word in words:
        assert word in str(error.value)


def test_gemma3_ropes_of_both_spellings():
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        }
    }
    old = {
        "rope_theta": 5e5,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    gemma = {**BASE, "head_dim": 16, "sliding_window_pattern": 3, "sliding_window": 8}
    parse = family("Gemma3ForCausalLM").parse
    assert parse({**gemma, **new}) == parse({**gemma, **old})
    local, other, full = parse({**gemma, **old}).ropes
    assert local == other
    assert (local.type, local.theta, local.factor) == ("default", 50.0, 1.0)
    assert (full.type, full.theta, full.factor) == ("linear", 5e5, 8.0)
    assert parse(gemma).ropes[0].theta == 10_000.0
    assert parse(gemma).ropes[2].theta == 1_000_000.0
