"""Writes tiny GGUF files: from scratch, or from a ``transformers`` model as llama.cpp's converter does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

_STEMS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
}
_GEMMA_STEMS = {
    **_STEMS,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(320)],
    "tokenizer.ggml.token_type": [1] * 320,
    "tokenizer.ggml.merges": ["t 1", "t 2"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def write_gguf(
    path: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, Type]]
) -> Path:
    """Writes ``metadata`` (keys without "general." or "tokenizer." get the architecture's) and tensors.

    Tensors are given in float32 and quantized here; a uint8 array is taken as already quantized.
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        full = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{arch}.{key}"
        _add(writer, full, value)
    for name, (array, kind) in tensors.items():
        raw = array if array.dtype == np.uint8 else gguf.quants.quantize(array, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    adders.get(type(value), writer.add_array)(key, value)


def convert(
    path: Path, arch: str, model: Any, kind: Type = Type.F32, extra: Mapping[str, Any] | None = None
) -> Path:
    """Stores a ``transformers`` model: matrices as ``kind``, vectors and routers as F32."""
    config = model.config
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, weight in _per_expert(model.state_dict()).items():
        _store(arch, config, name, weight, tensors, experts)
    tensors.update({name: np.stack(arrays) for name, arrays in experts.items()})
    if config.tie_word_embeddings:
        tensors.pop("output.weight", None)
    kinds = {n: Type.F32 if a.ndim == 1 or "gate_inp" in n else kind for n, a in tensors.items()}
    metadata = {**_sizes(config), **TOKENIZER, **(extra or {})}
    return write_gguf(path, arch, metadata, {name: (array, kinds[name]) for name, array in tensors.items()})


def _sizes(config: Any) -> dict[str, Any]:
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": _head_dim(config),
        "attention.value_length": _head_dim(config),
        "rope.dimension_count": _head_dim(config),
    }


def _head_dim(config: Any) -> int:
    return config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads


def _per_expert(state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Splits the stacked experts that ``transformers`` 5 keeps in memory into the tensors of a checkpoint."""
    result = {}
    for name, weight in state.items():
        array = weight.float().numpy()
        stem, _, last = name.rpartition(".")
        if not stem.endswith("experts"):
            result[name] = array
            continue
        for expert, matrix in enumerate(array):
            halves = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
            for part, rows in zip(halves, np.split(matrix, len(halves))):
                result[f"{stem}.{expert}.{part}.weight"] = rows
    return result


def hugging_face_tensors(model: Any) -> dict[str, np.ndarray]:
    """What a Hugging Face checkpoint of the model holds, float32."""
    tensors = _per_expert(model.state_dict())
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors


def _store(arch, config, name, weight, tensors, experts) -> None:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        target = f"{_TOP[stem]}.{suffix}"
    else:
        _, _, layer, part = stem.split(".", 3)
        if ".experts." in part:
            kind = part.rsplit(".", 1)[1].removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{kind}_exps.weight", []).append(weight)
            return
        stems = _GEMMA_STEMS if arch.startswith("gemma") else _STEMS
        target = f"blk.{layer}.{stems[part]}.{suffix}"
    if arch == "llama" and (".attn_q." in target or ".attn_k." in target):
        h = _head_dim(config)
        weight = weight.reshape(-1, 2, h // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    if arch.startswith("gemma") and target.endswith("norm.weight"):
        weight = weight + 1
    tensors[target] = np.ascontiguousarray(weight)
