"""Tensor names of GGUF files in Hugging Face terms, and what the conversion to GGUF did to the values.

Sources: llama.cpp's ``convert_hf_to_gguf.py`` (what is stored) and ``gguf/constants.py`` (names).
"""

import re
from dataclasses import dataclass
from typing import Literal

Transform = Literal["none", "unpermute", "minus_one"]
"""unpermute: rows of a head are stored as (h/2, 2), wanted as (2, h/2). minus_one: norms are stored + 1."""

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    **_COMMON,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QWEN3_MOE = {
    **_COMMON,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
_PHI3 = {**_COMMON, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_BLOCK_NAMES = {
    "llama": _COMMON,
    "qwen2": _COMMON,
    "qwen3": _COMMON,
    "qwen3moe": _QWEN3_MOE,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": _PHI3,
}
SUPPORTED_ARCHITECTURES = tuple(_BLOCK_NAMES)
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the configuration (see ``gguf_rope``), not to the weights."""

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP_LEVEL = re.compile(r"(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class HFName:
    """Hugging Face name of a GGUF tensor.

    Attributes:
        template: contains ``{expert}`` if the tensor stacks experts along its first axis.
    """

    template: str
    transform: Transform

    @property
    def stacked(self) -> bool:
        return "{expert}" in self.template


def hf_name(architecture: str, name: str) -> HFName | None:
    """Translates a GGUF tensor name; None if the architecture has no such tensor."""
    if match := _BLOCK.fullmatch(name):
        layer, stem, suffix = match.groups()
        target = _BLOCK_NAMES[architecture].get(stem)
        prefix = f"model.layers.{int(layer)}."
    elif match := _TOP_LEVEL.fullmatch(name):
        stem, suffix = match.groups()
        target, prefix = _TOP.get(stem), ""
    else:
        return None
    if target is None:
        return None
    return HFName(f"{prefix}{target}.{suffix}", _transform(architecture, stem))


def _transform(architecture: str, stem: str) -> Transform:
    if architecture == "llama" and stem in ("attn_q", "attn_k"):
        return "unpermute"
    if architecture.startswith("gemma") and stem.endswith("norm"):
        return "minus_one"
    return "none"
