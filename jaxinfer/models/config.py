"""What a decoder model is: the architecture as read from a checkpoint's configuration."""

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; names follow the Hugging Face configuration.

    Attributes:
        theta: base of the frequencies.
        rotary_dim: number of leading features of a head that are rotated (partial: less than the head width).
        original_max_position: context length before scaling (dynamic, llama3, yarn, longrope).
        max_position: context length after scaling (``max_position_embeddings``).
        factor: scaling factor; the other fields belong to one type each.
    """

    type: RopeType
    theta: float
    rotary_dim: int
    max_position: int
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts of a sparse MLP."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk: bool
    sparse_layers: tuple[bool, ...]


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer. A family's ``parse`` fills it from a Hugging Face style dict.

    Attributes:
        architecture: Hugging Face architecture name, the key of the registry.
        windows: per layer, the sliding window or None.
        ropes: per layer (local and global layers may differ).
        query_scale: factor of the attention scores.
        embedding_scale: factor of the embeddings (Gemma: sqrt(D)).
        norm_offset: added to every norm weight (Gemma: 1).
        max_position: context length the model was trained for.
        eos_token_ids: all ids that end a generation.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    activation: Activation
    norm_eps: float
    tie_word_embeddings: bool
    max_position: int
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig, ...]
    query_scale: float
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    moe: MoEConfig | None = None
