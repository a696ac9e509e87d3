"""Qwen3 mixture of experts: Qwen3 whose MLPs are sparse in some or all layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.checkpoints.weight_map import WeightMap, tensor
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import decoder_config, flag, moe_config, optional_int, required_int
from jaxinfer.models.hf_rope import parse_ropes
from jaxinfer.models.hf_weights import decoder_weights, expert_weights


def parse(hf: Mapping[str, Any]) -> TransformerConfig:
    """See ``Family.parse``. A sliding window, if it is used, is on all layers."""
    layers = required_int(hf, "num_hidden_layers")
    window = optional_int(hf, "sliding_window", 4096) if flag(hf, "use_sliding_window", False) else None
    config = decoder_config(hf, "Qwen3MoeForCausalLM", ropes=parse_ropes(hf), windows=(window,) * layers)
    step = optional_int(hf, "decoder_sparse_step", 1) or 1
    dense = hf.get("mlp_only_layers") or ()
    moe = moe_config(
        hf,
        experts_key="num_experts" if "num_experts" in hf else "num_local_experts",
        intermediate_key="moe_intermediate_size",
        norm_topk=flag(hf, "norm_topk_prob", False),
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )
    bias = flag(hf, "attention_bias", False)
    return replace(config, qk_norm=True, qkv_bias=bias, output_bias=bias, moe=moe)


def weight_map(config: TransformerConfig) -> WeightMap:
    """See ``Family.weight_map``."""
    weights = decoder_weights(config)
    assert config.moe is not None
    for layer, sparse in enumerate(config.moe.sparse_layers):
        if sparse:
            hf, path = f"model.layers.{layer}.mlp.", f"layers.{layer}.mlp."
            weights[f"{path}router.weight"] = tensor(f"{hf}gate.weight")
            names = expert_weights(
                config.moe.num_experts, f"{hf}experts.", gate="gate_proj", up="up_proj", down="down_proj"
            )
            weights |= {path + name: source for name, source in names.items()}
    return weights


FAMILY = Family(parse=parse, weight_map=weight_map)
