"""Reads rotary embeddings from ``config.json``, in the spellings of ``transformers`` 4 and 5.

Version 4 has ``rope_theta`` and ``rope_scaling`` (whose type is called ``rope_type`` or ``type``), version 5
one dict ``rope_parameters``, which may be nested by layer type. A value inside the dict wins over one next to
it, except ``original_max_position_embeddings``, where ``transformers`` gives priority to the outer one.
"""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import RopeConfig, RopeType
from jaxinfer.models.hf_config import LAYER_TYPES, head_dim, required_int

ROPE_TYPES: dict[str, RopeType] = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",  # the first name of longrope, in early Phi-3 checkpoints
}
REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


def parse_ropes(hf: Mapping[str, Any], theta: float = 10_000.0) -> tuple[RopeConfig, ...]:
    """The same rope for every layer; ``theta`` is the family's base where the checkpoint names none."""
    return (parse_rope(hf, rope_dict(hf), theta),) * required_int(hf, "num_hidden_layers")


def rope_dict(hf: Mapping[str, Any], layer_type: str | None = None) -> Mapping[str, Any]:
    """The scaling dict of the configuration (of one layer type if they are nested), {} if there is none."""
    spec = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(spec, Mapping):
        raise ValueError(f"config.json: rope_scaling / rope_parameters must be an object, not {spec!r}")
    if not any(key in spec for key in LAYER_TYPES):
        return spec
    if layer_type is None:
        raise ValueError(
            "config.json: rope_parameters are given per layer type, which this architecture has not"
        )
    return spec.get(layer_type) or {}


def parse_rope(
    hf: Mapping[str, Any],
    spec: Mapping[str, Any],
    theta: float,
    *,
    theta_key: str = "rope_theta",
    aliases: Mapping[str, RopeType] | None = None,
) -> RopeConfig:
    """One rope.

    Args:
        spec: the dict with type and factors; see ``rope_dict``.
        theta: base if neither ``spec`` nor ``hf[theta_key]`` has one.
        aliases: family-specific meaning of type names.

    Raises:
        ValueError: unknown type, or a missing or malformed field; the message names it and what is allowed.
    """
    name = spec.get("rope_type", spec.get("type", "default")) or "default"
    types = {**ROPE_TYPES, **(aliases or {})}
    if name not in types:
        raise ValueError(f"config.json: rope type {name!r} is not supported; supported: {', '.join(types)}")
    kind = types[name]
    for key in REQUIRED[kind]:
        if spec.get(key) is None:
            raise ValueError(
                f"config.json: rope type {name!r} needs {key!r}; given: {', '.join(sorted(spec))}"
            )
    max_position = required_int(hf, "max_position_embeddings")
    original = hf.get("original_max_position_embeddings") or spec.get("original_max_position_embeddings")
    original = max_position if original is None else original
    factor = _number(spec, "factor", default=max_position / original if kind == "longrope" else 1.0)
    rotary_dim = _rotary_dim(hf, spec)
    outer_theta = hf.get(theta_key)
    return RopeConfig(
        type=kind,
        theta=_number(spec, "rope_theta", default=theta if outer_theta is None else float(outer_theta)),
        rotary_dim=rotary_dim,
        max_position=max_position,
        factor=factor,
        original_max_position=original if kind in ("llama3", "yarn", "longrope") else None,
        low_freq_factor=_optional(spec, "low_freq_factor"),
        high_freq_factor=_optional(spec, "high_freq_factor"),
        attention_factor=_optional(spec, "attention_factor"),
        beta_fast=_number(spec, "beta_fast", default=32.0),
        beta_slow=_number(spec, "beta_slow", default=1.0),
        mscale=_optional(spec, "mscale"),
        mscale_all_dim=_optional(spec, "mscale_all_dim"),
        truncate=bool(spec.get("truncate", True)),
        short_factor=_factors(spec, "short_factor", rotary_dim) if kind == "longrope" else (),
        long_factor=_factors(spec, "long_factor", rotary_dim) if kind == "longrope" else (),
    )


def _rotary_dim(hf: Mapping[str, Any], spec: Mapping[str, Any]) -> int:
    width = head_dim(hf)
    partial = spec.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    rotary = int(width * (1.0 if partial is None else partial))
    if rotary % 2 or not 2 <= rotary <= width:
        raise ValueError(
            f"config.json: partial_rotary_factor {partial!r} rotates {rotary} of {width} features; "
            f"it must be an even number from 2 to {width}"
        )
    return rotary


def _number(spec: Mapping[str, Any], key: str, *, default: float) -> float:
    value = spec.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"config.json: rope {key!r} must be a positive number, not {value!r}")
    return float(value)


def _optional(spec: Mapping[str, Any], key: str) -> float | None:
    return None if spec.get(key) is None else _number(spec, key, default=0.0)


def _factors(spec: Mapping[str, Any], key: str, rotary_dim: int) -> tuple[float, ...]:
    values = spec[key]
    if not isinstance(values, list | tuple) or len(values) != rotary_dim // 2:
        raise ValueError(
            f"config.json: rope {key!r} must be a list of {rotary_dim // 2} numbers, not {values!r}"
        )
    return tuple(_number({key: v}, key, default=0.0) for v in values)
