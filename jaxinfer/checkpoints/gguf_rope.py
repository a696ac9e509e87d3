"""RoPE scaling of a GGUF file as a Hugging Face ``rope_scaling`` dict.

GGUF keeps Llama 3's and LongRoPE's scaling as tensors of factors per frequency, the other types as metadata
(llama.cpp, ``convert_hf_to_gguf.py``).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
_KNOWN = {
    "type",
    "factor",
    "original_context_length",
    "attn_factor",
    "finetuned",
    "yarn_beta_fast",
    "yarn_beta_slow",
}


def llama3_factors(theta: float, rotary_dim: int, factor: float) -> np.ndarray:
    """Divisors of the frequencies, float64 ``[rotary_dim / 2]``, with the constants that every Llama 3.x
    uses.

    Source: Llama 3.1 (https://arxiv.org/abs/2407.21783), reference code ``apply_scaling``.
    """
    wavelength = 2 * math.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    smooth = (_LLAMA3_CONTEXT / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    blended = 1 / ((1 - smooth) / factor + smooth)
    low, high = wavelength > _LLAMA3_CONTEXT / _LLAMA3_LOW, wavelength < _LLAMA3_CONTEXT / _LLAMA3_HIGH
    return np.where(low, factor, np.where(high, 1.0, blended))


def _from_freqs(freqs: np.ndarray, theta: float, rotary_dim: int) -> dict[str, Any]:
    """Recovers Llama 3's scaling factor from ``rope_freqs.weight``, and checks that it explains it."""
    factor = float(freqs.max())
    if freqs.shape != (rotary_dim // 2,) or not np.allclose(
        llama3_factors(theta, rotary_dim, factor), freqs, rtol=1e-3
    ):
        raise CheckpointError("rope_freqs.weight is not the scaling of Llama 3.x; no other kind is supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _longrope(
    scaling: dict[str, Any], read_tensor: Callable[[str], np.ndarray | None], max_position: int
) -> dict[str, Any]:
    factors = [read_tensor(f"rope_factors_{kind}.weight") for kind in ("short", "long")]
    if factors[0] is None or factors[1] is None:
        raise CheckpointError("longrope needs both rope_factors_short.weight and rope_factors_long.weight")
    original = int(scaling.get("original_context_length", max_position))
    result: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": factors[0].tolist(),
        "long_factor": factors[1].tolist(),
        "factor": max_position / original,
        "original_max_position_embeddings": original,
    }
    if "attn_factor" in scaling:
        result["attention_factor"] = scaling["attn_factor"]
    return result


def _yarn(scaling: dict[str, Any], max_position: int) -> dict[str, Any]:
    factor = float(scaling["factor"])
    original = int(scaling.get("original_context_length") or max_position / factor)
    result: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    # GGUF's attn_factor multiplies YaRN's own 0.1 ln(s) + 1; Hugging Face's attention_factor replaces it.
    if scaling.get("attn_factor", 1.0) != 1.0:
        result["attention_factor"] = scaling["attn_factor"] * (0.1 * math.log(factor) + 1)
    for beta in ("beta_fast", "beta_slow"):
        if f"yarn_{beta}" in scaling:
            result[beta] = scaling[f"yarn_{beta}"]
    return result


def rope_scaling(
    scaling: dict[str, Any],
    read_tensor: Callable[[str], np.ndarray | None],
    theta: float,
    rotary_dim: int,
    max_position: int,
) -> dict[str, Any] | None:
    """The ``rope_scaling`` of a Hugging Face configuration; None for plain RoPE.

    Args:
        scaling: metadata below ``<arch>.rope.scaling.``.
        read_tensor: float32 values of a tensor of the file, None if it has none of that name.

    Raises:
        CheckpointError: an unknown type or key, or factors that no supported type explains.
    """
    if unknown := sorted(set(scaling) - _KNOWN):
        raise CheckpointError(f"rope.scaling.{unknown[0]} is not supported; known keys are {sorted(_KNOWN)}")
    kind = scaling.get("type", "none")
    if kind == "longrope" or read_tensor("rope_factors_long.weight") is not None:
        return _longrope(scaling, read_tensor, max_position)
    freqs = read_tensor("rope_freqs.weight")
    if freqs is not None:
        return _from_freqs(freqs, theta, rotary_dim)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"rope.scaling.type {kind!r} is not supported; known are none, linear, yarn, longrope"
        )
    if not scaling.get("factor", 0.0) > 0.0:
        raise CheckpointError(
            f"rope.scaling.type is {kind!r}, but rope.scaling.factor is {scaling.get('factor')!r}"
        )
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(scaling["factor"])}
    return _yarn(scaling, max_position)
