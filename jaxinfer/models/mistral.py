"""Mistral 7B and its successors: Llama with an optional sliding window on all layers."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import decoder_config, optional_int, required_int
from jaxinfer.models.hf_rope import parse_ropes
from jaxinfer.models.hf_weights import decoder_weights


def parse(hf: Mapping[str, Any]) -> TransformerConfig:
    """See ``Family.parse``. An absent ``sliding_window`` means 4096, null means none."""
    windows = (optional_int(hf, "sliding_window", 4096),) * required_int(hf, "num_hidden_layers")
    return decoder_config(hf, "MistralForCausalLM", ropes=parse_ropes(hf), windows=windows)


FAMILY = Family(parse=parse, weight_map=decoder_weights)
