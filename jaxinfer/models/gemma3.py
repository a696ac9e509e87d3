"""Gemma 3, text: Gemma 2 with norms of q and k, mostly local layers, and a rope of their own for these."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxinfer.models.config import RopeConfig, TransformerConfig
from jaxinfer.models.family import Family
from jaxinfer.models.gemma2 import gemma_config
from jaxinfer.models.hf_config import (
    decoder_config,
    layer_types,
    layer_windows,
    optional_float,
    optional_int,
    required_int,
)
from jaxinfer.models.hf_rope import parse_rope, rope_dict
from jaxinfer.models.hf_weights import decoder_weights


def parse(hf: Mapping[str, Any]) -> TransformerConfig:
    """See ``Family.parse``."""
    return _parse({"head_dim": 256, **hf}, "Gemma3ForCausalLM")


def parse_multimodal(hf: Mapping[str, Any]) -> TransformerConfig:
    """The language model of an image and text checkpoint, whose configuration is in ``text_config``.

    ``tie_word_embeddings`` and the special tokens may be inside or outside; the outer value wins.
    """
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"config.json: 'text_config' must be an object, not {text!r}")
    # Early checkpoints omit what equals the defaults of the class.
    defaults = {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "vocab_size": 262_208,
    }
    outer = {
        key: hf[key]
        for key in ("tie_word_embeddings", "eos_token_id", "bos_token_id")
        if hf.get(key) is not None
    }
    return _parse({**defaults, **text, **outer}, "Gemma3ForConditionalGeneration")


def _parse(hf: Mapping[str, Any], architecture: str) -> TransformerConfig:
    pattern = optional_int(hf, "sliding_window_pattern", 6) or 6
    default = tuple(
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(required_int(hf, "num_hidden_layers"))
    )
    ropes = {"sliding_attention": _local_rope(hf), "full_attention": _global_rope(hf)}
    config = decoder_config(
        hf,
        architecture,
        ropes=tuple(ropes[kind] for kind in layer_types(hf, default)),
        windows=layer_windows(hf, optional_int(hf, "sliding_window", 4096), default),
        tie_default=True,
        activation_key="hidden_activation",
    )
    return replace(
        gemma_config(hf, config), qk_norm=True, final_soft_cap=optional_float(hf, "final_logit_softcapping")
    )


def _global_rope(hf: Mapping[str, Any]) -> RopeConfig:
    return parse_rope(hf, rope_dict(hf, "full_attention"), 1_000_000.0)


def _local_rope(hf: Mapping[str, Any]) -> RopeConfig:
    # A flat ``rope_scaling`` belongs to the global layers only.
    nested = "rope_parameters" in hf and not hf.get("rope_scaling")
    spec = rope_dict(hf, "sliding_attention") if nested else {}
    return parse_rope(hf, spec, 10_000.0, theta_key="rope_local_base_freq")


FAMILY = Family(parse=parse, weight_map=decoder_weights)
MULTIMODAL = Family(
    parse=parse_multimodal,
    weight_map=partial(decoder_weights, prefix="language_model.model.", head="language_model.lm_head.weight"),
)
