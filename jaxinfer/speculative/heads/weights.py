"""The tensor names of published draft heads, and where each parameter comes from."""

from collections.abc import Iterator

import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.tensor_source import TensorInfo, TensorSource
from jaxinfer.checkpoints.weight_map import Source, WeightMap, tensor
from jaxinfer.models.hf_weights import dense_layer_weights
from jaxinfer.speculative.heads.config import EagleConfig, MedusaConfig
from jaxinfer.speculative.heads.head import PREFIX, Method

EMBEDDING = "embed_tokens.weight"
OFFSETS = "d2t"
"""Of each draft id: target id - draft id."""
TOKEN_MAP = "token_map"
"""vLLM's Medusa: the target ids of the draft ids."""
_TABLES = (OFFSETS, "t2d", TOKEN_MAP)
_SHARED_HEADS = ("lm_head.weight", "lm_heads.0.weight")


class HeadTensors:
    """A ``TensorSource`` of a draft head under one set of names, whatever prefix the file's names have.

    ``model.``, ``medusa_heads.`` and ``medusa_head.`` in front are dropped, ``midlayer.`` becomes ``layers.0.``.

    Args:
        hidden: names (in the new form) that are left out.
    """

    def __init__(self, source: TensorSource, hidden: frozenset[str] = frozenset()) -> None:
        self._source = source
        self._names = {plain_name(name): name for name in source.names()}
        self._listed = tuple(name for name in self._names if name not in hidden)

    def names(self) -> tuple[str, ...]:
        return self._listed

    def info(self, name: str) -> TensorInfo:
        return self._source.info(self._names[name])

    def read(self, name: str) -> np.ndarray:
        return self._source.read(self._names[name])

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        return self._source.chunks(self._names[name])

    def blocks(self, name: str) -> np.ndarray:
        return self._source.blocks(self._names[name])

    def origin(self, name: str) -> str:
        return self._source.origin(self._names[name])


def plain_name(name: str) -> str:
    """The name of a head's tensor without what differs between projects."""
    for prefix in ("model.", "medusa_heads.", "medusa_head."):
        name = name.removeprefix(prefix)
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def method_of(tensors: HeadTensors) -> Method:
    """Which kind of head the tensors are.

    Raises:
        CheckpointError: none that is known.
    """
    names = frozenset(tensors.names())
    if "fc.weight" in names:
        return "eagle3" if "layers.0.hidden_norm.weight" in names else "eagle"
    if {"0.0.linear.weight", "blocks.0.layers.0.weight"} & names:
        return "medusa"
    raise CheckpointError(
        f"{_place(tensors)}: not a draft head that can be read; known are Medusa (0.0.linear.weight or "
        f"blocks.0.layers.0.weight), EAGLE (fc.weight, layers.0...) and EAGLE-3 (fc.weight, midlayer...); "
        f"it holds {sorted(names)[:10]}"
    )


def read_vocab_map(tensors: HeadTensors, draft_vocab_size: int, vocab_size: int) -> np.ndarray | None:
    """Target ids of the draft ids, int32; None where the head predicts the whole vocabulary.

    Raises:
        CheckpointError: the table is missing, or does not list different tokens in increasing order.
    """
    names = tensors.names()
    if draft_vocab_size == vocab_size:
        return None
    found = next((name for name in (OFFSETS, TOKEN_MAP) if name in names), None)
    if found is None:
        raise CheckpointError(
            f"{_place(tensors)}: the head predicts {draft_vocab_size} of {vocab_size} tokens, but neither "
            f"{OFFSETS!r} nor {TOKEN_MAP!r} says which"
        )
    values = np.asarray(tensors.read(found)).astype(np.int64)
    ids = values + np.arange(len(values)) if found == OFFSETS else values
    good = (
        ids.shape == (draft_vocab_size,) and ids[0] >= 0 and ids[-1] < vocab_size and (np.diff(ids) > 0).all()
    )
    if not good:
        raise CheckpointError(
            f"{tensors.origin(found)}: {found!r} does not name {draft_vocab_size} different tokens below "
            f"{vocab_size} in increasing order"
        )
    return ids.astype(np.int32)


def unused_names(method: Method, tensors: HeadTensors) -> frozenset[str]:
    """Tensors that are known and not loaded as parameters: tables, and output heads that are the target's."""
    names = {name for name in tensors.names() if name in _TABLES}
    if method == "eagle":
        names |= {name for name in _SHARED_HEADS if name in tensors.names()}
    return frozenset(names)


def eagle_weights(config: EagleConfig) -> WeightMap:
    """Names of EAGLE-1/2 heads, as ``HeadTensors`` lists them."""
    weights = {"fc.weight": tensor("fc.weight")}
    if config.fc_bias:
        weights["fc.bias"] = tensor("fc.bias")
    return _with_layers(weights, config)


def eagle3_weights(config: EagleConfig) -> WeightMap:
    """Names of EAGLE-3 heads, as ``HeadTensors`` lists them."""
    weights = {
        "fc.weight": tensor("fc.weight"),
        "norm.weight": tensor("norm.weight"),
        "lm_head.weight": tensor("lm_head.weight"),
        "embedding_norm.weight": tensor("layers.0.input_layernorm.weight"),
        "feature_norm.weight": tensor("layers.0.hidden_norm.weight"),
    }
    return _with_layers(weights, config)


def medusa_weights(config: MedusaConfig, *, own: bool) -> WeightMap:
    """Names of Medusa heads: their authors' own, or vLLM's."""
    weights: dict[str, Source] = {}
    for k in range(config.num_heads):
        for j in range(config.num_blocks):
            block = f"{k}.{j}.linear" if own else f"blocks.{k}.layers.{j}"
            weights[f"heads.{k}.blocks.{j}.linear.weight"] = tensor(f"{block}.weight")
            if config.block_bias:
                weights[f"heads.{k}.blocks.{j}.linear.bias"] = tensor(f"{block}.bias")
        if not config.shared_output:
            output = f"{k}.{config.num_blocks}.weight" if own else f"lm_heads.{k}.weight"
            weights[f"heads.{k}.output.weight"] = tensor(output)
    return {f"{PREFIX}.{path}": source for path, source in weights.items()}


def _with_layers(weights: dict[str, Source], config: EagleConfig) -> WeightMap:
    if config.own_embedding:
        weights["embed.weight"] = tensor(EMBEDDING)
    for i in range(config.layer.num_layers):
        layer = dense_layer_weights(config.layer, f"layers.{i}.")
        if i == 0:
            # The first layer has no norm of its own before the attention.
            del layer["input_norm.weight"]
        path = "first" if i == 0 else f"rest.{i - 1}"
        weights |= {f"{path}.{key}": source for key, source in layer.items()}
    return {f"{PREFIX}.{path}": source for path, source in weights.items()}


def _place(tensors: HeadTensors) -> str:
    names = tensors.names()
    return tensors.origin(names[0]).split(" (as ")[0] if names else "a checkpoint without tensors"
