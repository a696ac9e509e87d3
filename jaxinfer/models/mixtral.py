"""Mixtral: Mistral whose MLPs are all sparse."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.checkpoints.weight_map import WeightMap, tensor
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import decoder_config, moe_config, optional_int, required_int
from jaxinfer.models.hf_rope import parse_ropes
from jaxinfer.models.hf_weights import decoder_weights, expert_weights


def parse(hf: Mapping[str, Any]) -> TransformerConfig:
    """See ``Family.parse``."""
    layers = required_int(hf, "num_hidden_layers")
    windows = (optional_int(hf, "sliding_window", None),) * layers
    config = decoder_config(
        hf, "MixtralForCausalLM", ropes=parse_ropes(hf, theta=1_000_000.0), windows=windows
    )
    moe = moe_config(
        hf,
        experts_key="num_local_experts",
        intermediate_key="intermediate_size",
        norm_topk=True,
        sparse_layers=(True,) * layers,
    )
    return replace(config, moe=moe)


def weight_map(config: TransformerConfig) -> WeightMap:
    """See ``Family.weight_map``."""
    weights = decoder_weights(config)
    assert config.moe is not None
    for layer in range(config.num_layers):
        hf, path = f"model.layers.{layer}.block_sparse_moe.", f"layers.{layer}.mlp."
        weights[f"{path}router.weight"] = tensor(f"{hf}gate.weight")
        names = expert_weights(config.moe.num_experts, f"{hf}experts.", gate="w1", up="w3", down="w2")
        weights |= {path + name: source for name, source in names.items()}
    return weights


FAMILY = Family(parse=parse, weight_map=weight_map)
