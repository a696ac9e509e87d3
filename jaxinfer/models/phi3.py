"""Phi-3 and Phi-4-mini: Llama with q/k/v and gate/up merged in the checkpoint; longrope, partial rotary."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoints.weight_map import WeightMap, tensor
from jaxinfer.models.config import RopeType, TransformerConfig
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import decoder_config, optional_int, required_int
from jaxinfer.models.hf_rope import parse_rope, rope_dict
from jaxinfer.models.hf_weights import decoder_weights

# Early checkpoints of the family call longrope by these names.
ALIASES: dict[str, RopeType] = {"su": "longrope", "yarn": "longrope"}


def parse(hf: Mapping[str, Any]) -> TransformerConfig:
    """See ``Family.parse``."""
    layers = required_int(hf, "num_hidden_layers")
    rope = parse_rope(hf, rope_dict(hf), 10_000.0, aliases=ALIASES)
    windows = (optional_int(hf, "sliding_window", None),) * layers
    return decoder_config(hf, "Phi3ForCausalLM", ropes=(rope,) * layers, windows=windows)


def weight_map(config: TransformerConfig) -> WeightMap:
    """See ``Family.weight_map``."""
    weights = decoder_weights(config)
    for layer in range(config.num_layers):
        hf = f"model.layers.{layer}."
        weights[f"layers.{layer}.attention.qkv.weight"] = tensor(f"{hf}self_attn.qkv_proj.weight")
        weights[f"layers.{layer}.mlp.gate_up.weight"] = tensor(f"{hf}mlp.gate_up_proj.weight")
    return weights


FAMILY = Family(parse=parse, weight_map=weight_map)
