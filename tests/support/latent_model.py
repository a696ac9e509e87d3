"""A tiny DeepSeek-V3 with random weights, on which engines run as on ``tiny_model``: a dense and a sparse layer."""

from functools import cache

from jaxinfer.models.registry import parse_config
from sharding.layout import ONE_DEVICE, Layout
from tests.support import engines
from tests.support.tiny_models import MAX_MODEL_LEN, TinyModel, make_model

_HF_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": engines.VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": MAX_MODEL_LEN,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": list(engines.EOS),
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "rope_theta": 1000.0,
}


@cache
def latent_model(layout: Layout = ONE_DEVICE) -> TinyModel:
    """Latents of 24 values and rotated keys of 8; ``TinyModel.logits`` does not know this model."""
    return make_model(parse_config(_HF_CONFIG), 0, layout, layers_per_segment=2)
