"""Parsing of configurations: what is read, what defaults mean, what is refused."""

from typing import Any

import pytest
from model_driver import REFERENCE_OPS

from jaxinfer.models.build import abstract_model
from jaxinfer.models.registry import FAMILIES, family, parse_config

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
DENSE = [name for name in FAMILIES if name != "Gemma3ForConditionalGeneration"]


def test_unknown_architecture_lists_the_supported():
    with pytest.raises(
        ValueError, match=r"'GPT2LMHeadModel' is not supported; supported: .*LlamaForCausalLM"
    ):
        family("GPT2LMHeadModel")
    with pytest.raises(ValueError, match="architectures"):
        parse_config(BASE)


@pytest.mark.parametrize("name", DENSE)
def test_every_parameter_has_a_source_and_no_source_is_left(name):
    for tied in (False, True):
        config = parse_config({**BASE, "architectures": [name], "tie_word_embeddings": tied})
        assert config.architecture == name
        weights = family(name).weight_map(config)
        assert set(weights) == set(abstract_model(config, REFERENCE_OPS, "float32").shapes)
        assert ("lm_head.weight" in weights) is not tied


@pytest.mark.parametrize("name", DENSE)
def test_lod_01_absent_tie_flag(name):
    """Pinned: an absent flag has the family's default (true for Gemma), as in ``transformers``."""
    config = parse_config({**BASE, "architectures": [name]})
    assert config.tie_word_embeddings is name.startswith("Gemma")


def test_lod_01_tie_flag_in_nested_text_config():
    """Pinned: the outer flag wins, then the one in ``text_config``, then the family's default."""
    outer = {"architectures": ["Gemma3ForConditionalGeneration"]}

    def tied(text: dict[str, Any], **fields: Any) -> bool:
        return parse_config({**outer, **fields, "text_config": {**BASE, **text}}).tie_word_embeddings

    assert tied({}) is True
    assert tied({"tie_word_embeddings": False}) is False
    assert tied({"tie_word_embeddings": False}, tie_word_embeddings=True) is True
    with pytest.raises(ValueError, match="text_config"):
        parse_config(outer)


def test_multimodal_names_are_prefixed():
    config = parse_config(
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": BASE, "eos_token_id": [1, 106]}
    )
    weights = family(config.architecture).weight_map(config)
    assert weights["embed.weight"].parts == (("language_model.model.embed_tokens.weight",),)
    assert config.eos_token_ids == (1, 106)


@pytest.mark.parametrize(
    ("name", "fields", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None,) * 4),
        ("MistralForCausalLM", {}, (4096,) * 4),
        ("MistralForCausalLM", {"sliding_window": None}, (None,) * 4),
        ("MistralForCausalLM", {"sliding_window": 8}, (8,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "max_window_layers": 0}, (None,) * 4),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None) * 2,
        ),
        ("Qwen3MoeForCausalLM", {"use_sliding_window": True, "sliding_window": 8}, (8,) * 4),
        ("MixtralForCausalLM", {}, (None,) * 4),
        ("Phi3ForCausalLM", {"sliding_window": 8}, (8,) * 4),
        ("Gemma2ForCausalLM", {"sliding_window": 8}, (8, None) * 2),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, None) * 2),
        ("Gemma3ForCausalLM", {"sliding_window": 8}, (8,) * 4),
    ],
)
def test_windows(name, fields, windows):
    assert family(name).parse({**BASE, **fields}).windows == windows


def test_end_tokens_and_defaults():
    parse = family("LlamaForCausalLM").parse
    assert parse({**BASE, "eos_token_id": 2}).eos_token_ids == (2,)
    assert parse({**BASE, "eos_token_id": [2, 7]}).eos_token_ids == (2, 7)
    assert parse(BASE).eos_token_ids == ()
    without = {k: v for k, v in BASE.items() if k not in ("head_dim", "num_key_value_heads")}
    assert (parse(without).head_dim, parse(without).num_kv_heads) == (16, 4)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("LlamaForCausalLM", {"hidden_act": "relu6"}, "'relu6' is not supported; supported: silu"),
        ("LlamaForCausalLM", {"hidden_size": None}, "'hidden_size' must be a positive integer"),
        ("LlamaForCausalLM", {"vocab_size": 0}, "'vocab_size' must be a positive integer"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
        ("LlamaForCausalLM", {"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false"),
        ("LlamaForCausalLM", {"rms_norm_eps": "small"}, "'rms_norm_eps' must be a positive number"),
        ("LlamaForCausalLM", {"head_dim": None, "hidden_size": 66}, "hidden_size 66 is not a multiple"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
        (
            "Qwen2ForCausalLM",
            {"layer_types": ["linear_attention"] * 4},
            "'linear_attention' is not supported",
        ),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 5}, "num_experts_per_tok 5"),
        ("MixtralForCausalLM", {"num_local_experts": None}, "'num_local_experts' must be a positive integer"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_refused(name, fields, words):
    with pytest.raises(ValueError, match=words):
        family(name).parse({**BASE, **fields})
