"""From a directory in a published layout to a draft head and its weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.loader import Param, load_params
from jaxinfer.checkpoints.model_files import read_json
from jaxinfer.checkpoints.safetensors_source import SafetensorsSource, find_safetensors
from jaxinfer.checkpoints.weight_map import WeightMap
from jaxinfer.models.config import TransformerConfig
from jaxinfer.speculative.heads.config import (
    EagleConfig,
    MedusaConfig,
    parse_eagle,
    parse_eagle3,
    parse_medusa,
)
from jaxinfer.speculative.heads.eagle import eagle_head
from jaxinfer.speculative.heads.eagle3 import eagle3_head
from jaxinfer.speculative.heads.head import DraftHead, Method
from jaxinfer.speculative.heads.medusa import medusa_head
from jaxinfer.speculative.heads.weights import (
    EMBEDDING,
    HeadTensors,
    eagle3_weights,
    eagle_weights,
    medusa_weights,
    method_of,
    read_vocab_map,
    unused_names,
)
from pallas_kernels.linear.packed import PackedWeight
from pallas_kernels.ops import Ops

HeadConfig = EagleConfig | MedusaConfig


@dataclass(frozen=True)
class HeadFiles:
    """An opened draft head; nothing but its vocabulary table has been read.

    Attributes:
        tensors: what is loaded as parameters; ``weights`` says which becomes what.
    """

    path: Path
    method: Method
    config: HeadConfig
    vocab_map: np.ndarray | None
    tensors: HeadTensors
    weights: WeightMap

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """As ``DraftHead.feature_layers``."""
        return () if isinstance(self.config, MedusaConfig) else self.config.feature_layers


def open_head(path: Path, target: TransformerConfig) -> HeadFiles:
    """Opens a directory with ``config.json`` and tensors of a Medusa, EAGLE-1/2 or EAGLE-3 head.

    Raises:
        CheckpointError: nothing that can be read, or a head of another target; the message names the file.
    """
    hf = read_json(path / "config.json")
    weights = find_safetensors(path)
    if weights is None:
        raise CheckpointError(f"{path}: no draft head: it has no *.safetensors file{_hint(path)}")
    source = SafetensorsSource(weights)
    tensors = HeadTensors(source)
    method = method_of(tensors)
    try:
        config = _parse(method, hf, target, tensors)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    vocab_map = read_vocab_map(tensors, config.draft_vocab_size, target.vocab_size)
    shown = HeadTensors(source, unused_names(method, tensors))
    return HeadFiles(path, method, config, vocab_map, shown, head_weights(config, method, shown))


def head_weights(config: HeadConfig, method: Method, tensors: HeadTensors) -> WeightMap:
    """The source of each parameter of a head."""
    if isinstance(config, MedusaConfig):
        return medusa_weights(config, own="0.0.linear.weight" in tensors.names())
    return eagle_weights(config) if method == "eagle" else eagle3_weights(config)


def make_head(
    method: Method,
    config: HeadConfig,
    vocab_map: np.ndarray | None,
    ops: Ops,
    dtype: jnp.dtype,
    *,
    param_dtype: jnp.dtype,
    max_model_len: int,
    group: int = 0,
) -> DraftHead:
    """Describes the head of a configuration; arguments as in ``eagle3_head``."""
    if isinstance(config, MedusaConfig):
        return medusa_head(config, ops, param_dtype=param_dtype, vocab_map=vocab_map)
    sizes: dict[str, Any] = {"param_dtype": param_dtype, "max_model_len": max_model_len, "group": group}
    if method == "eagle":
        return eagle_head(config, ops, dtype, **sizes)
    return eagle3_head(config, ops, dtype, vocab_map=vocab_map, **sizes)


def load_head(
    head: DraftHead, files: HeadFiles, place: Callable[[str, np.ndarray | PackedWeight], Param]
) -> dict[str, Param]:
    """Reads the parameters of a head, by path; ``tuple(params[p] for p in head.paths)`` are its leaves.

    Raises:
        CheckpointError: tensors are missing, left over, of another shape, or not finite; all are listed.
    """
    return load_params(head.shapes, files.weights, files.tensors, place)


def _parse(method: Method, hf: dict[str, Any], target: TransformerConfig, tensors: HeadTensors) -> HeadConfig:
    if method == "medusa":
        return parse_medusa(hf, target)
    names = tensors.names()
    if method == "eagle3":
        return replace(parse_eagle3(hf, target), own_embedding=EMBEDDING in names)
    return replace(parse_eagle(hf, target), own_embedding=EMBEDDING in names, fc_bias="fc.bias" in names)


def _hint(path: Path) -> str:
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt") for file in path.glob(pattern))
    if not pickles:
        return ""
    return (
        f"; it has {', '.join(pickles)}: convert that to safetensors first (with torch: "
        "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors'))"
    )
