"""The tensor names that most Hugging Face decoders share; families replace what differs."""

from jaxinfer.checkpoints.weight_map import Rows, Source, WeightMap, concat, tensor
from jaxinfer.models.config import LatentConfig, TransformerConfig


def decoder_weights(
    config: TransformerConfig, prefix: str = "model.", head: str = "lm_head.weight"
) -> WeightMap:
    """Names of Llama-like checkpoints: q, k, v, gate and up are separate tensors.

    Args:
        prefix: of all tensors but the output head.
        head: name of the output head, which tied models do not have.
    """
    weights = {
        "embed.weight": tensor(f"{prefix}embed_tokens.weight"),
        "final_norm.weight": tensor(f"{prefix}norm.weight"),
    }
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = tensor(head)
    for layer in range(config.num_layers):
        names = _layer_weights(config, f"{prefix}layers.{layer}.")
        weights |= {f"layers.{layer}.{path}": source for path, source in names.items()}
        if config.moe is None or not config.moe.sparse_layers[layer]:
            dense = dense_mlp_weights(config, f"{prefix}layers.{layer}.mlp.")
            weights |= {f"layers.{layer}.mlp.{path}": source for path, source in dense.items()}
    return weights


def dense_layer_weights(config: TransformerConfig, hf: str) -> dict[str, Source]:
    """One layer with a dense MLP, whose tensors start with ``hf``, by path in the layer."""
    mlp = {f"mlp.{path}": source for path, source in dense_mlp_weights(config, f"{hf}mlp.").items()}
    return _layer_weights(config, hf) | mlp


def _layer_weights(config: TransformerConfig, hf: str) -> dict[str, Source]:
    if config.latent is None:
        attention = _attention_weights(config, f"{hf}self_attn.")
    else:
        attention = _latent_weights(config, config.latent, f"{hf}self_attn.")
    weights = {f"attention.{path}": source for path, source in attention.items()}
    weights["input_norm.weight"] = tensor(f"{hf}input_layernorm.weight")
    if config.post_norms:
        weights["attention_post_norm.weight"] = tensor(f"{hf}post_attention_layernorm.weight")
        weights["mlp_norm.weight"] = tensor(f"{hf}pre_feedforward_layernorm.weight")
        weights["mlp_post_norm.weight"] = tensor(f"{hf}post_feedforward_layernorm.weight")
    else:
        # The Llama name of the norm before the MLP.
        weights["mlp_norm.weight"] = tensor(f"{hf}post_attention_layernorm.weight")
    return weights


def _attention_weights(config: TransformerConfig, hf: str) -> dict[str, Source]:
    def qkv(suffix: str) -> Source:
        return concat(*(f"{hf}{part}_proj.{suffix}" for part in "qkv"))

    weights = {"qkv.weight": qkv("weight"), "output.weight": tensor(f"{hf}o_proj.weight")}
    if config.qkv_bias:
        weights["qkv.bias"] = qkv("bias")
    if config.output_bias:
        weights["output.bias"] = tensor(f"{hf}o_proj.bias")
    if config.qk_norm:
        weights["q_norm.weight"] = tensor(f"{hf}q_norm.weight")
        weights["k_norm.weight"] = tensor(f"{hf}k_norm.weight")
    return weights


def _latent_weights(config: TransformerConfig, latent: LatentConfig, hf: str) -> dict[str, Source]:
    per_head = latent.plain_dim + latent.value_dim
    down: tuple[str, ...] = (f"{hf}kv_a_proj_with_mqa",)
    if latent.query_rank is not None:
        down = (f"{hf}q_a_proj", *down)
    weights = {
        "down.weight": concat(*(f"{name}.weight" for name in down)),
        "norm.weight": tensor(f"{hf}kv_a_layernorm.weight"),
        "key_up.weight": tensor(f"{hf}kv_b_proj.weight", rows=Rows(per_head, 0, latent.plain_dim)),
        "value_up.weight": tensor(f"{hf}kv_b_proj.weight", rows=Rows(per_head, latent.plain_dim, per_head)),
        "output.weight": tensor(f"{hf}o_proj.weight"),
    }
    if config.qkv_bias:
        weights["down.bias"] = concat(*(f"{name}.bias" for name in down))
    if config.output_bias:
        weights["output.bias"] = tensor(f"{hf}o_proj.bias")
    if latent.query_rank is None:
        return weights | {"query.weight": tensor(f"{hf}q_proj.weight")}
    return weights | {
        "query_norm.weight": tensor(f"{hf}q_a_layernorm.weight"),
        "query.weight": tensor(f"{hf}q_b_proj.weight"),
    }


def dense_mlp_weights(config: TransformerConfig, hf: str) -> dict[str, Source]:
    """A gated MLP whose tensors start with ``hf``, by path in the MLP."""
    weights = {
        "gate_up.weight": concat(f"{hf}gate_proj.weight", f"{hf}up_proj.weight"),
        "down.weight": tensor(f"{hf}down_proj.weight"),
    }
    if config.mlp_bias:
        weights["gate_up.bias"] = concat(f"{hf}gate_proj.bias", f"{hf}up_proj.bias")
        weights["down.bias"] = tensor(f"{hf}down_proj.bias")
    return weights


def expert_weights(num_experts: int, hf: str, gate: str, up: str, down: str) -> dict[str, Source]:
    """Expert tensors named ``{hf}{expert}.{gate|up|down}.weight``."""
    experts = range(num_experts)
    return {
        "experts.gate_up": Source(tuple((f"{hf}{e}.{gate}.weight", f"{hf}{e}.{up}.weight") for e in experts)),
        "experts.down": Source(tuple((f"{hf}{e}.{down}.weight",) for e in experts)),
    }
