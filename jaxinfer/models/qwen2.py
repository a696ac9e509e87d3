"""Qwen2 and Qwen2.5: biases on q, k and v; the upper layers may have a sliding window."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import decoder_config, flag, layer_windows, optional_int, required_int
from jaxinfer.models.hf_rope import parse_ropes
from jaxinfer.models.hf_weights import decoder_weights


def windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Window of each layer: with ``use_sliding_window``, those from ``max_window_layers`` on have one."""
    first = hf.get("max_window_layers", 28)
    default = tuple(
        "sliding_attention" if layer >= first else "full_attention"
        for layer in range(required_int(hf, "num_hidden_layers"))
    )
    window = optional_int(hf, "sliding_window", 4096) if flag(hf, "use_sliding_window", False) else None
    return layer_windows(hf, window, default)


def parse(hf: Mapping[str, Any]) -> TransformerConfig:
    """See ``Family.parse``."""
    config = decoder_config(hf, "Qwen2ForCausalLM", ropes=parse_ropes(hf), windows=windows(hf))
    return replace(config, qkv_bias=True)


FAMILY = Family(parse=parse, weight_map=decoder_weights)
