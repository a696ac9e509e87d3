"""Gemma 2: norms before and after, scaled embeddings, soft caps, alternating local and global layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import (
    decoder_config,
    flag,
    layer_windows,
    optional_float,
    optional_int,
    required_int,
)
from jaxinfer.models.hf_rope import parse_ropes
from jaxinfer.models.hf_weights import decoder_weights


def gemma_config(hf: Mapping[str, Any], config: TransformerConfig) -> TransformerConfig:
    """What Gemma 2 and 3 have in common beyond the plain decoder.

    Raises:
        ValueError: bidirectional attention, which only embedding models use.
    """
    if flag(hf, "use_bidirectional_attention", False):
        raise ValueError("config.json: use_bidirectional_attention is not supported; the engine is causal")
    bias = flag(hf, "attention_bias", False)
    scalar = optional_float(hf, "query_pre_attn_scalar")
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
        query_scale=(256.0 if scalar is None else scalar) ** -0.5,
    )


def parse(hf: Mapping[str, Any]) -> TransformerConfig:
    """See ``Family.parse``. Absent soft caps mean 50 (attention) and 30 (logits), null means none."""
    kinds = ("sliding_attention", "full_attention")
    default = tuple(kinds[layer % 2] for layer in range(required_int(hf, "num_hidden_layers")))
    hf = {"head_dim": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **hf}
    config = decoder_config(
        hf,
        "Gemma2ForCausalLM",
        ropes=parse_ropes(hf),
        windows=layer_windows(hf, optional_int(hf, "sliding_window", 4096), default),
        tie_default=True,
        activation_key="hidden_activation",
    )
    return replace(
        gemma_config(hf, config),
        attention_soft_cap=optional_float(hf, "attn_logit_softcapping"),
        final_soft_cap=optional_float(hf, "final_logit_softcapping"),
    )


FAMILY = Family(parse=parse, weight_map=decoder_weights)
