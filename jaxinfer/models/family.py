"""What the registry knows about one model family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.checkpoints.weight_map import WeightMap
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.decoder import DecoderLM


@dataclass(frozen=True)
class Family:
    """How to read a checkpoint of an architecture and build its model.

    Attributes:
        parse: from ``config.json`` as a dict. Raises ValueError for what is missing or not supported.
        weight_map: parameter paths to checkpoint tensors.
        unused: beginnings of the names of checkpoint tensors that the model does not use.
        build: the module, called as ``build(config, ops, dtype=, param_dtype=, max_model_len=)``. Parameters
            are zeros, or shapes only under ``nnx.eval_shape``.
    """

    parse: Callable[[Mapping[str, Any]], TransformerConfig]
    weight_map: Callable[[TransformerConfig], WeightMap]
    unused: Callable[[TransformerConfig], tuple[str, ...]] = lambda config: ()
    build: Callable[..., DecoderLM] = DecoderLM
