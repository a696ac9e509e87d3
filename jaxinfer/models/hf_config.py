"""Reads the fields that all families share from a Hugging Face ``config.json``."""

from collections.abc import Mapping
from typing import Any, TypeVar

from jaxinfer.models.config import Activation, MoEConfig, RopeConfig, TransformerConfig

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
T = TypeVar("T")
LAYER_TYPES = ("full_attention", "sliding_attention")


def required_int(hf: Mapping[str, Any], key: str) -> int:
    """A positive integer field; ValueError if it is missing or something else."""
    value = hf.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key!r} must be a positive integer, not {value!r}")
    return value


def optional_int(hf: Mapping[str, Any], key: str, default: int | None) -> int | None:
    """A positive integer or null; ``default`` if the field is absent."""
    if key not in hf:
        return default
    return None if hf[key] is None else required_int(hf, key)


def natural(hf: Mapping[str, Any], key: str, default: int) -> int:
    """An integer that is not negative; ``default`` if the field is absent or null."""
    value = hf.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"config.json: {key!r} must be an integer that is not negative, not {value!r}")
    return value


def one_of(hf: Mapping[str, Any], key: str, supported: tuple[T, ...]) -> T:
    """A field with few supported values; the first of them if it is absent or null."""
    value = hf.get(key)
    if value is None:
        return supported[0]
    if value not in supported:
        raise ValueError(
            f"config.json: {key}={value!r} is not supported; supported: {', '.join(map(str, supported))}"
        )
    return value


def optional_float(hf: Mapping[str, Any], key: str) -> float | None:
    """A positive number, or None if the field is absent or null."""
    value = hf.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"config.json: {key!r} must be a positive number, not {value!r}")
    return float(value)


def flag(hf: Mapping[str, Any], key: str, default: bool) -> bool:
    """A boolean field; ``default`` if it is absent or null."""
    value = hf.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key!r} must be true or false, not {value!r}")
    return value


def head_dim(hf: Mapping[str, Any]) -> int:
    """Width of a head: ``head_dim``, or hidden size / heads."""
    if hf.get("head_dim") is not None:
        return required_int(hf, "head_dim")
    D, H = required_int(hf, "hidden_size"), required_int(hf, "num_attention_heads")
    if D % H:
        raise ValueError(
            f"config.json: hidden_size {D} is not a multiple of num_attention_heads {H}; set head_dim"
        )
    return D // H


def activation(hf: Mapping[str, Any], key: str = "hidden_act") -> Activation:
    """The activation of the MLP."""
    name = hf.get(key)
    if name not in ACTIVATIONS:
        raise ValueError(
            f"config.json: activation {key}={name!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def layer_windows(
    hf: Mapping[str, Any], window: int | None, default: tuple[str, ...]
) -> tuple[int | None, ...]:
    """Window of each layer, from ``layer_types`` or, if that is absent, the family's default types."""
    types = layer_types(hf, default)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def layer_types(hf: Mapping[str, Any], default: tuple[str, ...]) -> tuple[str, ...]:
    """Attention type of each layer: "full_attention" or "sliding_attention"."""
    types = hf.get("layer_types")
    types = default if types is None else tuple(types)
    if len(types) != required_int(hf, "num_hidden_layers"):
        raise ValueError(f"config.json: {len(types)} layer_types for {hf['num_hidden_layers']} layers")
    unknown = sorted(set(types) - set(LAYER_TYPES))
    if unknown:
        raise ValueError(f"config.json: layer type {unknown[0]!r} is not supported; supported: {LAYER_TYPES}")
    return types


def moe_config(
    hf: Mapping[str, Any],
    *,
    experts_key: str,
    intermediate_key: str,
    norm_topk: bool,
    sparse_layers: tuple[bool, ...],
) -> MoEConfig:
    """The routed experts; ValueError if there are fewer than two, or fewer than a token uses."""
    E, X = required_int(hf, experts_key), required_int(hf, "num_experts_per_tok")
    if E < 2 or X > E:
        raise ValueError(
            f"config.json: num_experts_per_tok {X} does not fit {experts_key} {E}: at most all, of at least 2"
        )
    return MoEConfig(E, X, required_int(hf, intermediate_key), norm_topk, sparse_layers)


def decoder_config(
    hf: Mapping[str, Any],
    architecture: str,
    *,
    ropes: tuple[RopeConfig, ...],
    windows: tuple[int | None, ...] | None = None,
    tie_default: bool = False,
    activation_key: str = "hidden_act",
) -> TransformerConfig:
    """The plain decoder: no biases, no extra norms, dense MLPs. Families replace what differs.

    Args:
        tie_default: meaning of an absent ``tie_word_embeddings``.

    Raises:
        ValueError: a field is missing, malformed or not supported; the message names it.
    """
    layers = required_int(hf, "num_hidden_layers")
    H, K = required_int(hf, "num_attention_heads"), optional_int(hf, "num_key_value_heads", None)
    K = H if K is None else K
    if H % K:
        raise ValueError(f"config.json: num_attention_heads {H} is not a multiple of num_key_value_heads {K}")
    eps = optional_float(hf, "rms_norm_eps")
    eos = hf.get("eos_token_id")
    return TransformerConfig(
        architecture=architecture,
        vocab_size=required_int(hf, "vocab_size"),
        hidden_size=required_int(hf, "hidden_size"),
        num_layers=layers,
        num_heads=H,
        num_kv_heads=K,
        head_dim=head_dim(hf),
        intermediate_size=required_int(hf, "intermediate_size"),
        activation=activation(hf, activation_key),
        norm_eps=1e-6 if eps is None else eps,
        tie_word_embeddings=flag(hf, "tie_word_embeddings", tie_default),
        max_position=required_int(hf, "max_position_embeddings"),
        windows=(None,) * layers if windows is None else windows,
        ropes=ropes,
        query_scale=head_dim(hf) ** -0.5,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        bos_token_id=hf.get("bos_token_id"),
    )
