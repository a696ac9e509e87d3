"""Parameters of a model by what they are for, and what one device holds of them under the rules of a layout."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp

from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.segments import segmented_model
from jaxinfer.planning.described import WeightFormat
from pallas_kernels.select import select_ops
from sharding.axes import Axis, AxisRules

Role = Literal["embedding", "head", "matrix", "experts", "other"]

WEIGHT_BYTES: dict[WeightFormat, float] = {"bf16": 2.0, "fp8": 1.0 + 4 / 128**2, "int4": 0.5 + 2 / 128}
"""Bytes of a weight of a matrix or an expert. fp8: float32 scales of 128 x 128 blocks (DeepSeek-V3, arXiv:2412.19437,
section 3.3.2); int4: bfloat16 scales of groups of 128."""


@dataclass(frozen=True)
class Parameter:
    """One array.

    Attributes:
        axes: logical axes of its dimensions.
        itemsize: bytes of an element as the engine holds it.
    """

    path: str
    role: Role
    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    itemsize: int

    def local_size(self, rules: AxisRules) -> int:
        """Elements that one device holds. ValueError if the devices cannot share it; names both numbers."""
        return math.prod(rules.local(axis, size) for axis, size in zip(self.axes, self.shape, strict=True))

    def local_bytes(self, rules: AxisRules, weights: WeightFormat) -> float:
        """Bytes that one device holds, if matrices and experts are held as ``weights``."""
        quantized = self.role in ("matrix", "experts") and weights != "bf16"
        return self.local_size(rules) * (WEIGHT_BYTES[weights] if quantized else self.itemsize)


@dataclass(frozen=True)
class ModelParts:
    """Parameters of a model; layers of one kind are listed once.

    Attributes:
        kinds: parameters of a layer of each kind.
        kind_of: the kind of each layer.
        embedding: the embedding. It is also the head, if these are tied.
        head: final norm and head.
    """

    config: TransformerConfig
    kinds: tuple[tuple[Parameter, ...], ...]
    kind_of: tuple[int, ...]
    embedding: tuple[Parameter, ...]
    head: tuple[Parameter, ...]

    def stage(self, first: int, stop: int) -> tuple[tuple[int, Parameter], ...]:
        """What a stage of these layers holds: how often, and what. A tied embedding is part of the first stage and of
        the last."""
        of_kind = [self.kind_of[first:stop].count(kind) for kind in range(len(self.kinds))]
        layers = [(count, p) for count, kind in zip(of_kind, self.kinds) for p in kind if count]
        edges: list[Parameter] = []
        if first == 0:
            edges += self.embedding
        if stop == len(self.kind_of):
            edges += [p for p in self.head if p not in edges]
        return (*layers, *((1, p) for p in edges))

    @property
    def num_parameters(self) -> int:
        """Of the whole model; a tied embedding counts once."""
        return sum(count * math.prod(p.shape) for count, p in self.stage(0, len(self.kind_of)))


@cache
def model_parts(config: TransformerConfig) -> ModelParts:
    """Builds one layer of each kind, without memory, the way the engine builds the whole model."""
    moe = config.moe
    sparse = (False,) * config.num_layers if moe is None else moe.sparse_layers
    keys = list(zip(config.windows, config.ropes, sparse, strict=True))
    kinds = list(dict.fromkeys(keys))
    windows, ropes, is_sparse = (tuple(column) for column in zip(*kinds))
    small = replace(
        config,
        num_layers=len(kinds),
        windows=windows,
        ropes=ropes,
        moe=None if moe is None else replace(moe, sparse_layers=is_sparse),
    )
    dtype = jnp.dtype(jnp.bfloat16)
    ops = select_ops("xla", "cpu", strict=False)
    model = segmented_model(
        small, ops, dtype, param_dtype=dtype, max_model_len=config.max_position, layers_per_segment=1
    )

    def of(paths: Iterable[str], role: Role | None = None) -> tuple[Parameter, ...]:
        found = []
        for path in paths:
            struct = model.shapes[path]
            assert isinstance(struct, jax.ShapeDtypeStruct), "nothing is packed before a checkpoint is read"
            role_of = role or _role(path, struct.shape)
            found.append(Parameter(path, role_of, struct.shape, model.axes[path], struct.dtype.itemsize))
        return tuple(found)

    embedding = of(model.embed_paths, "embedding")
    tied = set(model.embed_paths)
    head = (
        (*embedding, *of(p for p in model.head_paths if p not in tied))
        if tied & set(model.head_paths)
        else ()
    )
    return ModelParts(
        config,
        kinds=tuple(of(segment.paths) for segment in model.segments),
        kind_of=tuple(kinds.index(key) for key in keys),
        embedding=embedding,
        head=head or of(model.head_paths),
    )


def _role(path: str, shape: tuple[int, ...]) -> Role:
    if path.startswith("lm_head."):
        return "head"
    if ".experts." in path:
        return "experts"
    return "matrix" if len(shape) == 2 and ".router." not in path else "other"
