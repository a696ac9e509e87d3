"""DeepSeek-V2: latent attention, and experts beside shared ones behind a few dense layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.checkpoints.weight_map import WeightMap, tensor
from jaxinfer.layers.rope import mscale
from jaxinfer.models.config import ExpertGroups, LatentConfig, MoEConfig, RopeConfig, TransformerConfig
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import (
    decoder_config,
    flag,
    moe_config,
    natural,
    one_of,
    optional_int,
    required_int,
)
from jaxinfer.models.hf_rope import parse_rope, rope_dict
from jaxinfer.models.hf_weights import decoder_weights, dense_mlp_weights, expert_weights


def parse(hf: Mapping[str, Any]) -> TransformerConfig:
    """See ``Family.parse``.

    ``norm_topk_prob`` is refused, because implementations differ in what it means beside ``routed_scaling_factor``.
    """
    one_of(hf, "scoring_func", ("softmax",))
    one_of(hf, "norm_topk_prob", (False,))
    method = one_of(hf, "topk_method", ("greedy", "group_limited_greedy"))
    groups = None if method == "greedy" else expert_groups(hf, best=1)
    config = latent_config(hf, "DeepseekV2ForCausalLM", interleaved=True)
    return replace(
        config, mlp_bias=flag(hf, "mlp_bias", False), moe=replace(sparse_config(hf, False), groups=groups)
    )


def latent_config(hf: Mapping[str, Any], architecture: str, *, interleaved: bool) -> TransformerConfig:
    """The decoder with latent attention, without its experts. ``num_key_value_heads`` means nothing here.

    Args:
        interleaved: see ``LatentConfig``.
    """
    latent = LatentConfig(
        query_rank=optional_int(hf, "q_lora_rank", None),
        rank=required_int(hf, "kv_lora_rank"),
        plain_dim=required_int(hf, "qk_nope_head_dim"),
        rope_dim=required_int(hf, "qk_rope_head_dim"),
        value_dim=required_int(hf, "v_head_dim"),
        interleaved=interleaved,
    )
    rope = parse_rope({**hf, "head_dim": latent.rope_dim}, rope_dict(hf), 10_000.0)
    head_dim = latent.plain_dim + latent.rope_dim
    config = decoder_config(
        {**hf, "head_dim": head_dim, "num_key_value_heads": hf.get("num_attention_heads")},
        architecture,
        ropes=(rope,) * required_int(hf, "num_hidden_layers"),
    )
    bias = flag(hf, "attention_bias", False)
    return replace(
        config, latent=latent, query_scale=_query_scale(head_dim, rope), qkv_bias=bias, output_bias=bias
    )


def _query_scale(head_dim: int, rope: RopeConfig) -> float:
    """The part of YaRN's factor that is not in the cosines and sines: it belongs to all features of a head."""
    if rope.type == "default" or rope.mscale_all_dim is None:
        return head_dim**-0.5
    return head_dim**-0.5 * mscale(rope, rope.mscale_all_dim) ** 2


def sparse_config(hf: Mapping[str, Any], norm_topk: bool) -> MoEConfig:
    """The experts: routed ones, and shared ones as one MLP, in all layers but the first."""
    one_of(hf, "moe_layer_freq", (1,))
    layers, dense = required_int(hf, "num_hidden_layers"), natural(hf, "first_k_dense_replace", 0)
    moe = moe_config(
        hf,
        experts_key="n_routed_experts",
        intermediate_key="moe_intermediate_size",
        norm_topk=norm_topk,
        sparse_layers=tuple(layer >= dense for layer in range(layers)),
    )
    scale = hf.get("routed_scaling_factor", 1.0)
    if not isinstance(scale, int | float) or isinstance(scale, bool):
        raise ValueError(f"config.json: 'routed_scaling_factor' must be a number, not {scale!r}")
    shared = natural(hf, "n_shared_experts", 0) * moe.intermediate_size
    return replace(moe, weight_scale=float(scale), shared_size=shared)


def expert_groups(hf: Mapping[str, Any], best: int) -> ExpertGroups | None:
    """Groups of experts of which a token uses a few; None if there is only one.

    Raises:
        ValueError: the groups do not divide the experts, or those of a token hold too few.
    """
    E, X = required_int(hf, "n_routed_experts"), required_int(hf, "num_experts_per_tok")
    count, chosen = required_int(hf, "n_group"), required_int(hf, "topk_group")
    if E % count or chosen > count or chosen * (E // count) < X or best > E // count:
        raise ValueError(
            f"config.json: n_group {count} and topk_group {chosen} do not fit n_routed_experts {E} and "
            f"num_experts_per_tok {X}: groups of one size, of which the chosen hold enough"
        )
    return None if count == 1 else ExpertGroups(count, chosen, best)


def weight_map(config: TransformerConfig) -> WeightMap:
    """See ``Family.weight_map``."""
    weights = decoder_weights(config)
    assert config.moe is not None
    for layer, sparse in enumerate(config.moe.sparse_layers):
        if sparse:
            names = _sparse_weights(config, config.moe, f"model.layers.{layer}.mlp.")
            weights |= {f"layers.{layer}.mlp.{path}": source for path, source in names.items()}
    return weights


def _sparse_weights(config: TransformerConfig, moe: MoEConfig, hf: str) -> WeightMap:
    weights = {"router.weight": tensor(f"{hf}gate.weight")}
    if moe.choice_bias:
        weights["choice_bias"] = tensor(f"{hf}gate.e_score_correction_bias")
    weights |= expert_weights(
        moe.num_experts, f"{hf}experts.", gate="gate_proj", up="up_proj", down="down_proj"
    )
    if moe.shared_size:
        shared = dense_mlp_weights(config, f"{hf}shared_experts.")
        weights |= {f"shared.{path}": source for path, source in shared.items()}
    return weights


FAMILY = Family(parse=parse, weight_map=weight_map)
