"""DeepSeek-V3 and R1: DeepSeek-V2 with sigmoid routing whose load is balanced by a bias of the choice."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.deepseek_v2 import expert_groups, latent_config, sparse_config, weight_map
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import flag, natural, one_of


def parse(hf: Mapping[str, Any]) -> TransformerConfig:
    """See ``Family.parse``."""
    one_of(hf, "scoring_func", ("sigmoid",))
    one_of(hf, "topk_method", ("noaux_tc",))
    config = latent_config(hf, "DeepseekV3ForCausalLM", interleaved=flag(hf, "rope_interleave", True))
    moe = replace(
        sparse_config(hf, norm_topk=flag(hf, "norm_topk_prob", True)),
        scoring="sigmoid",
        choice_bias=True,
        groups=expert_groups(hf, best=2),
    )
    return replace(config, moe=moe, draft_layers=natural(hf, "num_nextn_predict_layers", 0))


def unused(config: TransformerConfig) -> tuple[str, ...]:
    """See ``Family.unused``: the layers for multi-token prediction."""
    first = config.num_layers
    return tuple(f"model.layers.{layer}." for layer in range(first, first + config.draft_layers))


FAMILY = Family(parse=parse, weight_map=weight_map, unused=unused)
