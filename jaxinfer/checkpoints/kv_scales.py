"""Scales of a quantized KV cache that a checkpoint carries."""

import logging
import re

import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.tensor_source import TensorSource

logger = logging.getLogger(__name__)

# Spellings in use: "self_attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.attn.k_scale"; and "kv_scale" for both.
_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?(k|v|kv)_scale")

LayerScales = dict[int, tuple[np.ndarray, np.ndarray]]
"""Layer to its (k, v) scales, float32, each of shape [1] or [K]."""


def is_kv_scale(name: str) -> bool:
    """Whether a tensor is a scale of the KV cache."""
    return _NAME.fullmatch(name) is not None


def read_kv_scales(source: TensorSource, num_layers: int, num_kv_heads: int) -> LayerScales:
    """Reads the scales for K and V of all layers.

    Returns:
        All layers, or nothing if the checkpoint has no scales: then they are 1, with a warning.

    Raises:
        CheckpointError: a scale is zero, negative or not finite, has another shape than a scalar, [1] or [K], or only
            some layers, or only K or V of a layer, have one. All problems are listed.
    """
    found: dict[tuple[int, str], np.ndarray] = {}
    problems: list[str] = []
    for name in source.names():
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        scale = np.asarray(source.read(name), np.float32).reshape(-1)
        if scale.size not in (1, num_kv_heads) or not (np.isfinite(scale) & (scale > 0)).all():
            problems.append(
                f"tensor {name!r} in {source.origin(name)} is {scale.tolist()[:8]}; a scale is a positive number, or "
                f"{num_kv_heads} of them (one per KV head)"
            )
        for kind in match[2]:
            found[int(match[1]), kind] = scale
    if found:
        missing = [(i, kind) for i in range(num_layers) for kind in "kv" if (i, kind) not in found]
        problems += [f"layer {layer} has no {kind}_scale, but others have one" for layer, kind in missing]
    if problems:
        raise CheckpointError(
            "the scales of the KV cache are wrong:\n" + "\n".join(f"  - {p}" for p in problems)
        )
    if not found:
        logger.warning("the checkpoint has no scales for a quantized KV cache: 1.0 is used for all layers")
        return {}
    return {layer: (found[layer, "k"], found[layer, "v"]) for layer in range(num_layers)}
