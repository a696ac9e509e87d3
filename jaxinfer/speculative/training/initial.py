"""Where training starts: the description of a new head, and its first parameters."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config_values import ConfigError
from jaxinfer.models.config import TransformerConfig
from jaxinfer.speculative.heads.config import default_feature_layers, parse_eagle, parse_eagle3, parse_medusa
from jaxinfer.speculative.heads.head import DraftHead, Method
from jaxinfer.speculative.heads.loading import HeadConfig
from jaxinfer.speculative.training.config import HeadOptions

_SCALE = 0.02


def published_config(method: Method, options: HeadOptions, target: TransformerConfig) -> dict[str, Any]:
    """The ``config.json`` of a new head.

    Raises:
        ConfigError: an option does not go with the method or the target.
    """
    vocab = options.draft_vocab_size
    if vocab is not None and (method == "eagle" or vocab > target.vocab_size):
        reason = "EAGLE-1/2 predicts all" if method == "eagle" else f"there are {target.vocab_size}"
        raise ConfigError(f"head.draft_vocab_size is {vocab}, but {reason} tokens")
    if method == "medusa":
        return _medusa(options, target)
    rope = target.ropes[0]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM" if method == "eagle" else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": options.intermediate_size or target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "num_hidden_layers": options.depth,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position,
        "rms_norm_eps": target.norm_eps,
        "rope_theta": rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if method == "eagle":
        return {**config, "bias": False}
    layers = options.feature_layers or default_feature_layers(target.num_layers)
    draft = {"draft_vocab_size": vocab or target.vocab_size}
    return {**config, **draft, "eagle_aux_hidden_state_layer_ids": list(layers)}


def _medusa(options: HeadOptions, target: TransformerConfig) -> dict[str, Any]:
    vocab = options.draft_vocab_size or target.vocab_size
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_heads": options.predictions,
        "num_hidden_layers": options.depth,
        "medusa_fc_bias": True,
        "truncated_vocab_size": vocab,
    }


def parsed_config(method: Method, hf: dict[str, Any], target: TransformerConfig) -> HeadConfig:
    """The same as an opened head has it."""
    if method == "medusa":
        return parse_medusa(hf, target)
    return replace(parse_eagle(hf, target), fc_bias=False) if method == "eagle" else parse_eagle3(hf, target)


def frequent_tokens(counts_V: np.ndarray, size: int) -> np.ndarray | None:
    """The ``size`` most frequent token ids, int32 and increasing; None for all. Ties and tokens that never occur: the
    smallest ids."""
    if size == len(counts_V):
        return None
    order = np.argsort(-counts_V, kind="stable")[:size]
    return np.sort(order).astype(np.int32)


def initial_params(
    head: DraftHead, output_VD: jax.Array, norm_D: jax.Array, seed: int
) -> dict[str, jax.Array]:
    """Parameters that already predict something: what the target's own output head makes of the feature.

    Args:
        output_VD: the target's output matrix, rows of the draft vocabulary.
        norm_D: factor of the target's final norm.
    """
    params = {}
    for index, (path, shape) in enumerate(head.shapes.items()):
        rng = np.random.default_rng([seed, index])
        params[path] = _initial(head.method, path, shape, rng, output_VD, norm_D)
    return params


def _initial(
    method: Method,
    path: str,
    shape: jax.ShapeDtypeStruct,
    rng: np.random.Generator,
    output_VD: jax.Array,
    norm_D: jax.Array,
) -> jax.Array:
    if path.endswith(("lm_head.weight", ".output.weight")) and ".attention." not in path:
        return jnp.array(output_VD, shape.dtype)  # a copy: each head trains its own
    if path.endswith("draft.norm.weight"):
        return jnp.array(norm_D, shape.dtype)
    if len(shape.shape) == 1:
        return jnp.full(shape.shape, 1.0 if "norm" in path else 0.0, shape.dtype)
    if method == "medusa":
        return jnp.zeros(shape.shape, shape.dtype)  # blocks are the identity, as published
    value = _SCALE * rng.standard_normal(shape.shape)
    if path.endswith("draft.fc.weight"):
        # The last of the joined inputs is the (highest) feature: the head starts by passing it on.
        D = shape.shape[0]
        value[:, -D:] += np.eye(D)
    return jnp.asarray(value, shape.dtype)
