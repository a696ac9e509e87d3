"""Qwen3 (dense): Qwen2 with norms of q and k, and without biases."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import decoder_config, flag
from jaxinfer.models.hf_rope import parse_ropes
from jaxinfer.models.hf_weights import decoder_weights
from jaxinfer.models.qwen2 import windows


def parse(hf: Mapping[str, Any]) -> TransformerConfig:
    """See ``Family.parse``."""
    # The family's width does not follow from the hidden size.
    hf = {**hf, "head_dim": hf.get("head_dim") or 128}
    config = decoder_config(hf, "Qwen3ForCausalLM", ropes=parse_ropes(hf), windows=windows(hf))
    bias = flag(hf, "attention_bias", False)
    return replace(config, qk_norm=True, qkv_bias=bias, output_bias=bias)


FAMILY = Family(parse=parse, weight_map=decoder_weights)
