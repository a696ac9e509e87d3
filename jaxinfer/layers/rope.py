"""Rotary position embedding (Su et al., 2021) and its context extensions."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import RopeConfig
from pallas_kernels.rope_kv_write.reference import rotate as rotate_halves


def frequencies(rope: RopeConfig, max_model_len: int) -> tuple[np.ndarray, float]:
    """Angle per position of each rotated pair, and the factor of the cosines and sines.

    ``dynamic`` and ``longrope`` depend on the sequence's length in their papers. Keys are cached rotated,
    so a length that grows would mix keys of several bases, and the result would depend on chunking, batching
    and prefix hits. Therefore the length is fixed to ``max_model_len``: the two equal the reference for a
    sequence of that length, and ``dynamic`` is plain rope if ``max_model_len`` is at most ``max_position``.

    Returns:
        float64 [rotary_dim / 2] in radians per token, and the attention factor.
    """
    base_i = rope.theta ** -(np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim)
    match rope.type:
        case "default":
            return base_i, 1.0
        case "linear":
            return base_i / rope.factor, 1.0
        case "dynamic":
            return _dynamic(rope, max_model_len), 1.0
        case "llama3":
            return _llama3(rope, base_i), 1.0
        case "yarn":
            return _yarn(rope, base_i), _yarn_attention_factor(rope)
        case "longrope":
            return _longrope(rope, base_i, max_model_len), _longrope_attention_factor(rope)


def rope_tables(positions_T: jax.Array, rope: RopeConfig, max_model_len: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of a step, float32 ``[T, rotary_dim / 2]`` each, attention factor included.

    Angles are 32-bit fractions of a turn, as in a numerically controlled oscillator: the product of position
    and fixed-point frequency wraps around exactly where the angle does. The error is at most
    ``position * 2**-33`` turns (1e-4 rad at position 100,000, where float32 angles are off by 1e-2), and the
    angle between two tokens depends on their distance only.
    """
    frequency_i, scale = frequencies(rope, max_model_len)
    step_i = np.round(frequency_i / (2 * math.pi) * 2.0**32).astype(np.uint64).astype(np.uint32)
    turns_Ti = positions_T.astype(jnp.uint32)[:, None] * jnp.asarray(step_i)[None, :]
    angle_Ti = jax.lax.bitcast_convert_type(turns_Ti, jnp.int32).astype(jnp.float32) * (2 * math.pi / 2.0**32)
    return jnp.cos(angle_Ti) * scale, jnp.sin(angle_Ti) * scale


def rotate(x_THh: jax.Array, table: tuple[jax.Array, jax.Array], interleaved: bool) -> jax.Array:
    """Rotates heads by the cosines and sines of their tokens.

    Args:
        interleaved: features 2 j and 2 j + 1 are a pair, else j and j + rotated width / 2. The result is in the second
            order either way: products of queries and keys do not depend on it.
    """
    if interleaved:
        x_THh = jnp.concatenate([x_THh[..., 0::2], x_THh[..., 1::2]], axis=-1)
    return rotate_halves(x_THh, *table)


def mscale(rope: RopeConfig, weight: float) -> float:
    """YaRN's factor for a longer context, which grows with the logarithm of the stretch (Peng et al., 2023)."""
    return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0


def _dynamic(rope: RopeConfig, max_model_len: int) -> np.ndarray:
    """NTK-aware base for a sequence of ``max_model_len`` tokens (bloc97 and emozilla, 2023)."""
    d = rope.rotary_dim
    length = max(max_model_len, rope.max_position)
    stretch = rope.factor * length / rope.max_position - (rope.factor - 1)
    theta = rope.theta * stretch ** (d / (d - 2))
    return theta ** -(np.arange(0, d, 2, dtype=np.float64) / d)


def _llama3(rope: RopeConfig, base_i: np.ndarray) -> np.ndarray:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between are blended."""
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    assert rope.original_max_position is not None
    rotations_i = rope.original_max_position * base_i / (2 * math.pi)
    blend_i = (rotations_i - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep_i = np.clip(blend_i, 0.0, 1.0)
    return base_i * (keep_i + (1 - keep_i) / rope.factor)


def _yarn(rope: RopeConfig, base_i: np.ndarray) -> np.ndarray:
    """YaRN (Peng et al., 2023), "NTK by parts": a linear ramp between kept and stretched frequencies."""
    assert rope.original_max_position is not None
    original, d = rope.original_max_position, rope.rotary_dim

    def dimension(rotations: float) -> float:
        return d * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    width = high - low if high != low else 0.001
    stretch_i = np.clip((np.arange(d // 2) - low) / width, 0.0, 1.0)
    return base_i * (1 - stretch_i) + base_i / rope.factor * stretch_i


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope, rope.mscale) / mscale(rope, rope.mscale_all_dim)
    return mscale(rope, 1.0)


def _longrope(rope: RopeConfig, base_i: np.ndarray, max_model_len: int) -> np.ndarray:
    """LongRoPE (Ding et al., 2024): one searched divisor per frequency, for short and for long contexts."""
    assert rope.original_max_position is not None
    is_long = max_model_len > rope.original_max_position
    return base_i / np.asarray(rope.long_factor if is_long else rope.short_factor, dtype=np.float64)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    assert rope.original_max_position is not None
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
