import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tiny_gguf_files import TOKENIZER, convert, write_gguf
from tiny_llama_files import make_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.gguf_config import gguf_config
from jaxinfer.checkpoints.gguf_metadata import read_gguf_header
from jaxinfer.checkpoints.gguf_rope import llama3_factors
from jaxinfer.models.registry import parse_config

LLAMA: dict[str, Any] = {
    "context_length": 64,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "norm_topk_prob": True,
}
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "Llama", {"head_dim": 32}, {}),
    "llama_tied": ("llama", "Llama", {"tie_word_embeddings": True, "attention_bias": False}, {}),
    "qwen2": ("qwen2", "Qwen2", {"rope_theta": 1e6}, {"rope.freq_base": 1e6}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 24}, {}),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3Moe",
        MOE,
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "gemma2": (
        "gemma2",
        "Gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 3},
        {
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "gemma3",
        "Gemma3Text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "num_hidden_layers": 7,
            "rope_parameters": LINEAR,
        },
        {
            "attention.sliding_window": 8,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "phi3": ("phi3", "Phi3", {"sliding_window": 9}, {"attention.sliding_window": 9}),
}


def config_of(path) -> dict[str, Any]:
    header = read_gguf_header(path)
    return gguf_config(path, header, frozenset(tensor.name for tensor in header.tensors))


def llama_config(tmp_path, tensors=None, **changes: Any) -> dict[str, Any]:
    """Configuration of a Llama file; ``changes`` has "__" for "." and None to leave a key out."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {k: v for k, v in (LLAMA | TOKENIZER | changes).items() if v is not None}
    return config_of(write_gguf(tmp_path / "x.gguf", "llama", metadata, tensors or {}))


@pytest.mark.parametrize("case", MODELS)
def test_same_model_as_the_hugging_face_configuration(tmp_path, case, caplog):
    arch, architecture, options, extra = MODELS[case]
    model = make_model(architecture, **options)
    model.config.save_pretrained(tmp_path)
    expected = json.loads((tmp_path / "config.json").read_text()) | {"architectures": [type(model).__name__]}
    config = config_of(convert(tmp_path / "x.gguf", arch, model, extra=extra))
    assert parse_config(config) == replace(parse_config(expected), eos_token_ids=(2,))
    assert config["torch_dtype"] is None
    assert "not understood" not in caplog.text


def test_tie_is_the_absence_of_an_output_tensor(tmp_path):
    head = {"output.weight": (np.ones((320, 64), np.float32), Type.F32)}
    assert llama_config(tmp_path)["tie_word_embeddings"] is True
    assert llama_config(tmp_path, head)["tie_word_embeddings"] is False


def test_vocabulary_size_is_the_number_of_tokens(tmp_path):
    assert llama_config(tmp_path, vocab_size=999)["vocab_size"] == 320
    without = dict.fromkeys(TOKENIZER)
    assert llama_config(tmp_path, vocab_size=999, **without)["vocab_size"] == 999


def test_all_end_tokens(tmp_path):
    """eos, eot, eom by their keys; known chat end tokens if they are control tokens."""
    tokens, types = list(TOKENIZER["tokenizer.ggml.tokens"]), list(TOKENIZER["tokenizer.ggml.token_type"])
    tokens[7], types[7] = "<end_of_turn>", 3
    tokens[8], types[8] = "<|im_end|>", 1
    config = llama_config(
        tmp_path,
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=types,
        tokenizer__ggml__eot_token_id=5,
        tokenizer__ggml__eom_token_id=2,
    )
    assert config["eos_token_id"] == [2, 5, 7]
    assert config["bos_token_id"] == 1


def test_end_token_outside_the_vocabulary(tmp_path):
    with pytest.raises(CheckpointError, match=r"x.gguf: end token ids \[320\]"):
        llama_config(tmp_path, tokenizer__ggml__eos_token_id=320)


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "context_length", "feed_forward_length"])
def test_missing_keys(tmp_path, key):
    with pytest.raises(CheckpointError, match=rf"x.gguf: metadata key llama.{key} is missing"):
        llama_config(tmp_path, **{key: None})


def test_values_per_layer(tmp_path):
    assert llama_config(tmp_path, feed_forward_length=[96, 96])["intermediate_size"] == 96
    with pytest.raises(
        CheckpointError, match=r"feed_forward_length is \[96, 128\]; one number for all layers"
    ):
        llama_config(tmp_path, feed_forward_length=[96, 128])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_count": 8}, "8 experts is not supported"),
        ({"attention__sliding_window": 128}, "no sliding window"),
        ({"attention__key_length": 16, "attention__value_length": 32}, "value_length differs"),
        ({"rope__scaling__type": "foo", "rope__scaling__factor": 2.0}, "type 'foo' is not supported"),
        ({"rope__scaling__type": "linear"}, "factor is None"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 0.0}, "factor is 0.0"),
        ({"rope__scaling__alpha": 1.0}, "rope.scaling.alpha is not supported"),
        ({"rope__scaling__type": "longrope"}, "needs both rope_factors_short.weight"),
    ],
)
def test_what_is_not_supported(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        llama_config(tmp_path, **changes)


def test_keys_that_are_not_understood_are_named(tmp_path, caplog):
    llama_config(tmp_path, strange__key=3)
    assert "'strange.key'" in caplog.text


def test_partial_rotary(tmp_path):
    assert llama_config(tmp_path, rope__dimension_count=8)["partial_rotary_factor"] == 0.5
    assert "partial_rotary_factor" not in llama_config(tmp_path, rope__dimension_count=16)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_lod_04_llama3_scaling_from_its_tensor(tmp_path, factor):
    """The factors per frequency are those of the reference, and the scaling is recovered from them."""
    config = make_model(
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ).config
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 5e5 ** (-np.arange(0, 128, 2) / 128)
    factors = (plain / scaled.numpy()).astype(np.float32)
    np.testing.assert_allclose(llama3_factors(5e5, 128, factor), factors, rtol=1e-4)
    found = llama_config(
        tmp_path,
        {"rope_freqs.weight": (factors, Type.F32)},
        attention__key_length=128,
        attention__value_length=128,
        rope__freq_base=5e5,
        context_length=131072,
    )
    scaling = {key: config.rope_parameters[key] for key in found["rope_scaling"]}
    assert found["rope_scaling"] == pytest.approx(scaling)
    assert found["rope_theta"] == 5e5


def test_lod_04_unexplained_factors_are_an_error(tmp_path):
    tensors = {"rope_freqs.weight": (np.linspace(1, 8, 8, dtype=np.float32), Type.F32)}
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight is not the scaling of Llama 3"):
        llama_config(tmp_path, tensors)


def test_lod_04_longrope(tmp_path):
    short, long = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(1, 9, 8, dtype=np.float32)
    tensors = {"rope_factors_short.weight": (short, Type.F32), "rope_factors_long.weight": (long, Type.F32)}
    config = llama_config(
        tmp_path,
        tensors,
        context_length=256,
        rope__scaling__original_context_length=64,
        rope__scaling__attn_factor=1.25,
    )
    assert config["rope_scaling"] == {
        "rope_type": "longrope",
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    }
    assert config["original_max_position_embeddings"] == 64


def test_lod_04_yarn(tmp_path):
    options = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    config = llama_config(tmp_path, **options, context_length=256)
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = llama_config(
        tmp_path,
        **options,
        rope__scaling__original_context_length=32,
        rope__scaling__attn_factor=2.0,
        rope__scaling__yarn_beta_fast=16.0,
    )
    assert config["rope_scaling"]["original_max_position_embeddings"] == 32
    assert config["rope_scaling"]["attention_factor"] == pytest.approx(2 * (0.1 * np.log(4) + 1))
    assert config["rope_scaling"]["beta_fast"] == 16.0


@pytest.mark.parametrize("pattern", [3, [True, True, False, True]])
def test_gemma_window_patterns(tmp_path, pattern):
    metadata = LLAMA | TOKENIZER | {"block_count": 4, "attention.sliding_window": 8}
    metadata["attention.sliding_window_pattern"] = pattern
    config = config_of(write_gguf(tmp_path / "x.gguf", "gemma3", metadata, {}))
    local, full = "sliding_attention", "full_attention"
    assert config["layer_types"] == [local, local, full, local]
