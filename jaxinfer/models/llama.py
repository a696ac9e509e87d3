"""Llama 1 to 3.2, and models that follow it exactly (SmolLM2, TinyLlama, ...)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import decoder_config, flag
from jaxinfer.models.hf_rope import parse_ropes
from jaxinfer.models.hf_weights import decoder_weights


def parse(hf: Mapping[str, Any]) -> TransformerConfig:
    """See ``Family.parse``."""
    config = decoder_config(hf, "LlamaForCausalLM", ropes=parse_ropes(hf))
    bias = flag(hf, "attention_bias", False)
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=flag(hf, "mlp_bias", False))


FAMILY = Family(parse=parse, weight_map=decoder_weights)
