"""Tiny random ``transformers`` models, one a case, with weights that make every part count."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

VOCAB = 320
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.5, 2.0, 4.0, 9.0],
    "original_max_position_embeddings": 32,
}
# Longest sequence that is served, where it is not the configuration's: keeps the short factors of longrope.
SERVED_LENGTH = {"phi3_longrope_partial": 32}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
}
LATENT_ROPE = {**YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 0.6}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_bias_tied_wide": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 32,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "mistral_full": ("Mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    "mistral_window": ("Mistral", {"sliding_window": 5, "rope_parameters": YARN_ROPE}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_upper_window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    ),
    "qwen3_moe_mixed": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_key_value_heads": 1,
            "sliding_window": 6,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": LATENT_ROPE,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": 20,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": LATENT_ROPE,
            "attention_bias": True,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 9}),
    "phi3_longrope_partial": (
        "Phi3",
        {
            "num_hidden_layers": 2,
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 32,
            "rope_parameters": LONGROPE,
        },
    ),
}


def make_model(case: str, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """The float32 model of a case, with eager attention and weights from ``seed``."""
    name, options = CASES[case]
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = config_class(**{**COMMON, **options, **changes}, attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    fill(model, torch.Generator().manual_seed(seed))
    return model


def fill(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Random weights that keep activations near 1, with norms away from their initial value."""
    with torch.no_grad():
        for path, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in path:
                weight.copy_(weight + 0.3 * noise)
            elif weight.ndim == 1 or "embed" in path:
                weight.copy_(noise)
            else:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
        for path, buffer in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def save(case: str, folder: Path, **changes: Any) -> torch.nn.Module:
    """Makes the model of a case and writes it as a checkpoint."""
    model = make_model(case, **changes)
    model.save_pretrained(folder)
    return model


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids."""
    return tuple(int(t) for t in np.random.default_rng(seed).integers(3, VOCAB, length))


def reference_logits(model: torch.nn.Module, tokens: tuple[int, ...]) -> np.ndarray:
    """``[T, V]`` logits of one sequence computed in one piece."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()
