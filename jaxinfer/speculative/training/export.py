"""Writes a trained head in its published layout: ``config.json`` and ``model.safetensors``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save

from jaxinfer.checkpoints.weight_map import Source
from jaxinfer.models.config import TransformerConfig
from jaxinfer.speculative.heads.config import EagleConfig, MedusaConfig
from jaxinfer.speculative.heads.head import Method
from jaxinfer.speculative.heads.loading import HeadConfig
from jaxinfer.speculative.heads.weights import (
    OFFSETS,
    TOKEN_MAP,
    eagle3_weights,
    eagle_weights,
    medusa_weights,
)
from jaxinfer.speculative.training.files import write_atomically

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def write_head(
    directory: Path,
    method: Method,
    hf: dict[str, Any],
    config: HeadConfig,
    vocab_map: np.ndarray | None,
    params: Mapping[str, np.ndarray],
    dtype: str,
) -> None:
    """Writes a head that ``open_head`` reads.

    Args:
        hf: the ``config.json``.
        params: by path.
        dtype: a key of ``DTYPES``; norms and biases are stored in it as well.
    """
    tensors: dict[str, np.ndarray] = {}
    for path, source in _weights(method, config).items():
        tensors |= _split(source, params[path], config)
    stored = {
        name if method != "eagle3" else name.replace("layers.0.", "midlayer.", 1): np.ascontiguousarray(
            value.astype(DTYPES[dtype])
        )
        for name, value in tensors.items()
    }
    if vocab_map is not None:
        stored |= _tables(method, config, vocab_map)
    text = json.dumps({**hf, "torch_dtype": dtype}, indent=2)
    write_atomically(directory / "config.json", lambda file: file.write(text.encode()))
    write_atomically(directory / "model.safetensors", lambda file: file.write(save(stored)))


def _weights(method: Method, config: HeadConfig) -> dict[str, Source]:
    if isinstance(config, MedusaConfig):
        return medusa_weights(config, own=False)
    return eagle_weights(config) if method == "eagle" else eagle3_weights(config)


def _split(source: Source, value: np.ndarray, config: HeadConfig) -> dict[str, np.ndarray]:
    """The tensors that a parameter joins: q, k and v, or gate and up."""
    (names,) = source.parts
    if len(names) == 1:
        return {names[0]: value}
    assert isinstance(config, EagleConfig)
    rows = _rows(config.layer, len(names))
    assert sum(rows) == len(value)
    return dict(zip(names, np.split(value, np.cumsum(rows)[:-1])))


def _rows(layer: TransformerConfig, parts: int) -> list[int]:
    if parts == 2:
        return [layer.intermediate_size] * 2
    return [layer.num_heads * layer.head_dim, *[layer.num_kv_heads * layer.head_dim] * 2]


def _tables(method: Method, config: HeadConfig, vocab_map: np.ndarray) -> dict[str, np.ndarray]:
    ids = vocab_map.astype(np.int64)
    if isinstance(config, MedusaConfig):
        return {TOKEN_MAP: ids}
    known = np.zeros(config.layer.vocab_size, bool)
    known[ids] = True
    return {OFFSETS: ids - np.arange(len(ids)), "t2d": known}
