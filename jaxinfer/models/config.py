"""What a decoder model is: the architecture as read from a checkpoint's configuration."""

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu_tanh", "gelu"]
Scoring = Literal["softmax", "sigmoid"]


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
class ExpertGroups:
    """Routing limited to a few groups of experts, so that a token's experts lie on few devices.

    Attributes:
        count: groups of consecutive experts of the same size.
        chosen: groups that a token may use.
        best: a group is as good as the sum of so many of its best experts.
    """

    count: int
    chosen: int
    best: int


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts of a sparse MLP.

    Attributes:
        norm_topk: the weights of a token's experts are divided by their sum.
        scoring: what makes scores of the router's outputs.
        groups: None: a token may use all experts.
        choice_bias: experts are chosen by their score plus a bias of each, and weighted without it.
        weight_scale: factor of the weights.
        shared_size: width of an MLP that every token passes beside its experts; 0 for none.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk: bool
    sparse_layers: tuple[bool, ...]
    scoring: Scoring = "softmax"
    groups: ExpertGroups | None = None
    choice_bias: bool = False
    weight_scale: float = 1.0
    shared_size: int = 0


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads are projections of one
    latent per token, beside a rotated key that the heads share. Both are what is cached.

    Attributes:
        query_rank: width of the latent of the queries; None: queries are projected at once.
        rank: width of the latent of keys and values, r.
        plain_dim: features of a head's queries and keys that are not rotated.
        rope_dim: features that are rotated, d.
        value_dim: features of a head's values.
        interleaved: the checkpoint's rotated features 2 j and 2 j + 1 are a pair; else j and j + d / 2.
    """

    query_rank: int | None
    rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool


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
        latent: latent attention; then ``num_kv_heads`` is ``num_heads``, and ``head_dim`` is that of queries and keys.
        draft_layers: layers behind the last one in the checkpoint, which predict further tokens; they are not used.
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
    latent: LatentConfig | None = None
    draft_layers: int = 0
