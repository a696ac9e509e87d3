"""A tiny random Llama with a byte tokenizer, as files that a server can load."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxinfer.tokenization.decode_rules import byte_level_alphabet
from jaxinfer.tokenization.gguf_vocabulary import build_tokenizer, read_vocabulary

MAX_MODEL_LEN = 8192
_SPECIALS = ("<s>", "</s>", "<|end|>")
_WIDTH, _HEADS, _MLP, _LAYERS = 32, 2, 48, 2
_VOCAB = 256 + len(_SPECIALS)
_CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def write(directory: Path) -> Path:
    """Writes the model; returns the directory."""
    directory.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCAB,
        "hidden_size": _WIDTH,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "intermediate_size": _MLP,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    (directory / "config.json").write_text(json.dumps(config))
    _write_tokenizer(directory)
    save_file(_weights(), str(directory / "model.safetensors"), {"format": "pt"})
    return directory


def _write_tokenizer(directory: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*byte_level_alphabet(), *_SPECIALS],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(_SPECIALS),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
    }
    backend, _ = build_tokenizer(read_vocabulary(metadata))
    backend.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": _CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.normal(size=(rows, columns)) * columns**-0.5).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(_VOCAB, _WIDTH),
        "model.norm.weight": np.ones(_WIDTH, np.float32),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{prefix}.self_attn.{name}.weight"] = matrix(_WIDTH, _WIDTH)
        for name in ("gate_proj", "up_proj"):
            weights[f"{prefix}.mlp.{name}.weight"] = matrix(_MLP, _WIDTH)
        weights[f"{prefix}.mlp.down_proj.weight"] = matrix(_WIDTH, _MLP)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = np.ones(_WIDTH, np.float32)
    return weights
