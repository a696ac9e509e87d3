"""Configuration of a GGUF model as a Hugging Face style dict.

Keys: ``gguf/constants.py``; what llama.cpp assumes where a key is missing: its ``src/llama-model.cpp``.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.gguf_metadata import GGUFHeader
from jaxinfer.checkpoints.gguf_rope import rope_scaling
from jaxinfer.checkpoints.gguf_source import gguf_architecture

logger = logging.getLogger(__name__)

_HF_NAMES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
}
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
"""Control tokens that end a turn in known chat formats; metadata often names only one of them."""
_CONTROL_TOKEN = 3
_GEMMA3_GLOBAL_EVERY = 6
_UNUSED = {"vocab_size", "rope.dimension_count_swa", "expert_weights_scale", "expert_gating_func"}
"""Keys that may be there and say nothing that is needed."""


class _Reader:
    """Typed access to the ``<arch>.`` keys; remembers which were read."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        prefix = architecture + "."
        self.values = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
        self.prefix = prefix
        self._read: set[str] = set()

    def _get(self, key: str, default: Any, types: tuple[type, ...]) -> Any:
        self._read.add(key)
        value = self.values.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if value is None:
            raise CheckpointError(f"metadata key {self.prefix}{key} is missing")
        if not isinstance(value, types) or isinstance(value, bool):
            raise CheckpointError(
                f"metadata key {self.prefix}{key} is {value!r}; one number for all layers is needed"
            )
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._get(key, default, (int,)))

    def number(self, key: str, default: float | None = None) -> float:
        # GGUF stores float32: the shortest decimal that it stands for is what the configuration had (1e-5,
        # not 9.99e-6).
        return float(str(np.float32(self._get(key, default, (int, float)))))

    def raw(self, key: str) -> Any:
        self._read.add(key)
        return self.values.get(key)

    def below(self, prefix: str) -> dict[str, Any]:
        found = {k.removeprefix(prefix): v for k, v in self.values.items() if k.startswith(prefix)}
        self._read.update(prefix + key for key in found)
        return found

    def unread(self) -> list[str]:
        return sorted(set(self.values) - self._read - _UNUSED)


def gguf_config(path: Path, header: GGUFHeader, tensor_names: frozenset[str]) -> dict[str, Any]:
    """Hugging Face style configuration of a GGUF model.

    Args:
        path: the file; small tensors with RoPE factors are read from it.
        tensor_names: GGUF names of the tensors of all parts of the model.

    Returns:
        ``architectures``, ``model_type``, sizes, RoPE, windows, soft caps, token ids; ``tie_word_embeddings``
        is true if there is no ``output.weight``; ``torch_dtype`` is None, since GGUF names none.

    Raises:
        CheckpointError: an unsupported architecture, or a key missing or malformed.
    """
    architecture = gguf_architecture(path, header)
    reader = _Reader(header.metadata, architecture)
    try:
        config = _common(reader, architecture, header, tensor_names)
        config.update(_rope(reader, path, header, config))
        config.update(_family(reader, architecture, config))
        config.update(_token_ids(header.metadata))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if unread := reader.unread():
        logger.warning("%s: metadata keys not understood and ignored: %s", path, unread)
    return config


def _common(
    reader: _Reader, architecture: str, header: GGUFHeader, tensor_names: frozenset[str]
) -> dict[str, Any]:
    name, model_type = _HF_NAMES[architecture]
    hidden, heads = reader.integer("embedding_length"), reader.integer("attention.head_count")
    head_dim = reader.integer("attention.key_length", hidden // heads)
    if reader.integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(
            "attention.value_length differs from attention.key_length; that is not supported"
        )
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    return {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": len(tokens) if tokens else reader.integer("vocab_size"),
        "hidden_size": hidden,
        "num_hidden_layers": reader.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": reader.integer("feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": reader.integer("context_length"),
        "attention_bias": "blk.0.attn_q.bias" in tensor_names,
        "mlp_bias": "blk.0.ffn_up.bias" in tensor_names,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "torch_dtype": None,
    }


def _rope(reader: _Reader, path: Path, header: GGUFHeader, config: dict[str, Any]) -> dict[str, Any]:
    theta = reader.number("rope.freq_base", 10000.0)
    rotary = reader.integer("rope.dimension_count", config["head_dim"])
    max_position = config["max_position_embeddings"]

    def read_tensor(name: str) -> np.ndarray | None:
        for tensor in header.tensors:
            if tensor.name == name:
                count = int(np.prod(tensor.shape))
                if tensor.type != 0 or header.data_start + tensor.offset + 4 * count > header.file_size:
                    raise CheckpointError(f"tensor {name!r} must be F32 and lie within the file")
                return np.fromfile(path, "<f4", count, offset=header.data_start + tensor.offset)
        return None

    scaling = rope_scaling(reader.below("rope.scaling."), read_tensor, theta, rotary, max_position)
    result: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    if rotary != config["head_dim"]:
        result["partial_rotary_factor"] = rotary / config["head_dim"]
    if scaling and scaling["rope_type"] == "longrope":
        result["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return result


def _family(reader: _Reader, architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """What only some architectures have."""
    if architecture.startswith("gemma"):
        return _gemma(reader, architecture, config)
    experts = reader.integer("expert_count", 0)
    if architecture == "qwen3moe":
        return {
            "num_experts": experts,
            "num_experts_per_tok": reader.integer("expert_used_count"),
            "moe_intermediate_size": reader.integer("expert_feed_forward_length"),
            "norm_topk_prob": bool(reader.raw("expert_weights_norm") is not False),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if experts or reader.integer("expert_used_count", 0):
        raise CheckpointError(f"{architecture} with {experts} experts is not supported")
    window = reader.integer("attention.sliding_window", 0)
    if architecture == "phi3":
        return {"sliding_window": window or None}
    if window:
        raise CheckpointError(
            f"attention.sliding_window is {window}; {architecture} has no sliding window here"
        )
    return {}


def _gemma(reader: _Reader, architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    # llama.cpp derives the scale from the size: only the 27B models scale by D / H instead of h.
    large = (architecture, layers) in (("gemma2", 46), ("gemma3", 62))
    result: dict[str, Any] = {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if large
        else config["head_dim"],
        "sliding_window": reader.integer("attention.sliding_window"),
        "layer_types": _layer_types(
            reader.raw("attention.sliding_window_pattern"),
            layers,
            2 if architecture == "gemma2" else _GEMMA3_GLOBAL_EVERY,
        ),
    }
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    for key, default in caps.items():
        value = reader.number(key, default if architecture == "gemma2" else 0.0)
        result[key] = value or None
    if architecture == "gemma3":
        result["rope_local_base_freq"] = reader.number("rope.freq_base_swa", 10000.0)
    return result


def _layer_types(pattern: Any, layers: int, default_period: int) -> list[str]:
    """``pattern`` is a period (every n-th layer is global), a list with True for local layers, or None."""
    if isinstance(pattern, list):
        if len(pattern) < layers:
            raise CheckpointError(
                f"attention.sliding_window_pattern has {len(pattern)} entries for {layers} layers"
            )
        local = [bool(entry) for entry in pattern[:layers]]
    else:
        period = default_period if pattern is None else int(pattern)
        local = [period > 0 and (layer + 1) % period != 0 for layer in range(layers)]
    return ["sliding_attention" if entry else "full_attention" for entry in local]


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Special ids; ``eos_token_id`` lists all that end a generation: eos, eot, eom, and known end tokens."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    types = metadata.get("tokenizer.ggml.token_type") or []
    named = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    end = [token_id for token_id in named if token_id is not None]
    if len(types) == len(tokens):
        control = (i for i, kind in enumerate(types) if kind == _CONTROL_TOKEN)
        end += [i for i in control if tokens[i] in _END_TOKENS]
    if bad := [token_id for token_id in end if tokens and not 0 <= token_id < len(tokens)]:
        raise CheckpointError(f"end token ids {bad} are outside the vocabulary of {len(tokens)}")
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end)),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
