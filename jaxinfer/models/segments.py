"""A model cut into segments of layers that compile separately.

Layers of the same kind make segments of the same shape, which share one compiled program: a model of 30 equal layers
compiles one segment and runs it several times. Compared with one program for all layers this divides the time to
compile by the number of segments, at the price of one dispatch per segment.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.kv_cache.layout import KVCache, LayerKV
from jaxinfer.layers.linear import Embedding, Linear
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.models.config import RopeConfig, TransformerConfig
from jaxinfer.models.decoder import DecoderLayer, DecoderLM, head_logits, rope_tables_of, valid_tokens
from jaxinfer.models.registry import family
from pallas_kernels.linear.packed import PackedWeight
from pallas_kernels.ops import Ops
from sharding.axes import Axis
from sharding.layout import Layout

Param = jax.Array | PackedWeight
Leaves = tuple[Param, ...]
Struct = jax.ShapeDtypeStruct | PackedWeight
Ropes = tuple[tuple[jax.Array, jax.Array], ...]


@dataclass(frozen=True)
class ModulePart:
    """The static half of a module, and the order of its parameters. Hashable."""

    graphdef: nnx.GraphDef
    keys: tuple[tuple[Any, ...], ...]

    def merge(self, leaves: Leaves) -> nnx.Module:
        flat: Any = list(zip(self.keys, leaves, strict=True))
        return nnx.merge(self.graphdef, nnx.from_flat_state(flat))


@dataclass(frozen=True)
class SegmentKind:
    """What makes two segments share a program: their layers, and which rope table each uses. Hashable."""

    layers: tuple[ModulePart, ...]
    ropes: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """Consecutive layers.

    Attributes:
        first: index of the first layer.
        paths: global parameter paths, in the order of the leaves.
        sparse: its layers that have experts, by their index in the whole model.
    """

    kind: SegmentKind
    first: int
    paths: tuple[str, ...]
    sparse: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.kind.layers)


@dataclass(frozen=True)
class SegmentedModel:
    """A model without weights, in parts.

    Attributes:
        shapes: dtype and shape of every parameter by path, of the shares of one device if there are several; packed
            weights have shapes for arrays.
        axes: logical axes of every parameter.
        packable: parameters that may be packed.
        embed_paths, head_paths: parameters of the first and the last part.
        embed: (leaves, batch) -> (x_TD, rope tables); token ids are resolved.
        ropes: batch -> rope tables.
        head: (leaves, hidden_PD) -> logits_PV in float32; the final norm is part of it, so it is computed for the
            rows that need logits only.
        final_norm: (leaves of the head, hidden_XD) -> normalised_XD, in the dtype of its input.
        output: (leaves of the head, normalised_PD) -> logits_PV in float32: the head without the final norm.
    """

    config: TransformerConfig
    shapes: dict[str, Struct]
    axes: dict[str, tuple[Axis, ...]]
    packable: frozenset[str]
    embed_paths: tuple[str, ...]
    embed: Callable[[Leaves, ForwardBatch], tuple[jax.Array, Ropes]]
    ropes: Callable[[ForwardBatch], Ropes]
    segments: tuple[Segment, ...]
    head_paths: tuple[str, ...]
    head: Callable[[Leaves, jax.Array], jax.Array]
    final_norm: Callable[[Leaves, jax.Array], jax.Array]
    output: Callable[[Leaves, jax.Array], jax.Array]

    def structs(self, paths: tuple[str, ...]) -> tuple[Struct, ...]:
        """Shapes of the leaves of a part."""
        return tuple(self.shapes[path] for path in paths)

    def specs(self, paths: tuple[str, ...], layout: Layout) -> tuple[PartitionSpec, ...]:
        """How the leaves of a part are spread."""
        return tuple(layout.rules.spec(self.axes[path]) for path in paths)

    def placed_structs(self, paths: tuple[str, ...], layout: Layout) -> tuple[Struct, ...]:
        """Shapes of the leaves of a part, all shares together."""
        structs, specs = self.structs(paths), self.specs(paths, layout)
        return tuple(
            struct if isinstance(struct, PackedWeight) else layout.struct(struct, spec)
            for struct, spec in zip(structs, specs)
        )


def segmented_model(
    config: TransformerConfig,
    ops: Ops,
    dtype: jnp.dtype,
    *,
    param_dtype: jnp.dtype,
    max_model_len: int,
    layers_per_segment: int,
    cuts: Iterable[int] = (),
) -> SegmentedModel:
    """Cuts a model into segments of ``layers_per_segment`` layers (some may be shorter); nothing is allocated.

    Args:
        cuts: layers at which a segment starts, so that what goes into them can be had.
    """
    build = partial(family(config.architecture).build, config, ops)
    model: DecoderLM = nnx.eval_shape(
        lambda: build(dtype=dtype, param_dtype=param_dtype, max_model_len=max_model_len)
    )
    params: dict[str, nnx.Param] = {}
    embed, embed_paths = abstract_part(model.embed, "embed", params)
    ropes = tuple(dict.fromkeys(config.ropes))
    segments = []
    for first, stop in _spans(config.num_layers, layers_per_segment, cuts):
        indices = range(first, stop)
        parts = [abstract_part(model.layers[i], f"layers.{i}", params) for i in indices]
        kind = SegmentKind(tuple(p for p, _ in parts), tuple(ropes.index(config.ropes[i]) for i in indices))
        sparse = tuple(i for i in indices if config.moe is not None and config.moe.sparse_layers[i])
        segments.append(Segment(kind, first, tuple(path for _, paths in parts for path in paths), sparse))
    norm, norm_paths = abstract_part(model.final_norm, "final_norm", params)
    output, output_paths = (
        (embed, embed_paths) if model.lm_head is None else abstract_part(model.lm_head, "lm_head", params)
    )
    return SegmentedModel(
        config=config,
        shapes=shapes_of(params),
        axes={path: param.get_metadata()["logical_axes"] for path, param in params.items()},
        packable=frozenset(
            path for path, param in params.items() if param.get_metadata().get("packable", False)
        ),
        embed_paths=embed_paths,
        embed=partial(_embed, config, embed, ropes, jnp.dtype(dtype), max_model_len),
        ropes=partial(_ropes, ropes, max_model_len),
        segments=tuple(segments),
        head_paths=norm_paths + output_paths,
        head=partial(_head, config, norm, output),
        final_norm=partial(_final_norm, norm),
        output=partial(_output, config, norm, output),
    )


def _spans(num_layers: int, longest: int, cuts: Iterable[int]) -> list[tuple[int, int]]:
    """First layer and end of each segment."""
    edges = sorted({0, num_layers} | {cut for cut in cuts if cut < num_layers})
    return [
        (first, min(first + longest, stop))
        for start, stop in pairwise(edges)
        for first in range(start, stop, longest)
    ]


def split_stages(model: SegmentedModel, starts: Sequence[int]) -> tuple[SegmentedModel, ...]:
    """The model as stages of consecutive layers: the first one embeds, the last one has the head.

    Args:
        starts: first layer of each stage; a segment starts at each of them. Layers of a stage count from 0.
    """
    ends = [*starts[1:], model.config.num_layers]
    stages = []
    for index, (start, end) in enumerate(zip(starts, ends)):
        inside = [segment for segment in model.segments if start <= segment.first < end]
        assert sum(segment.num_layers for segment in inside) == end - start, "a segment lies in two stages"
        segments = tuple(replace(segment, first=segment.first - start) for segment in inside)
        stages.append(
            replace(
                model,
                segments=segments,
                embed_paths=model.embed_paths if index == 0 else (),
                head_paths=model.head_paths if index + 1 == len(starts) else (),
            )
        )
    return tuple(stages)


def with_vocabulary(model: SegmentedModel, vocab_size: int) -> SegmentedModel:
    """The model with logits for so many tokens: padding beyond the vocabulary is dropped, missing tokens have none."""

    def head(leaves: Leaves, hidden_PD: jax.Array) -> jax.Array:
        logits_PV = model.head(leaves, hidden_PD)[:, :vocab_size]
        missing = vocab_size - logits_PV.shape[1]
        return jnp.pad(logits_PV, ((0, 0), (0, missing)), constant_values=-jnp.inf)

    return replace(model, head=head) if model.config.vocab_size != vocab_size else model


def run_segment(
    kind: SegmentKind, leaves: Leaves, kv_cache: KVCache, x_TD: jax.Array, ropes: Ropes, batch: ForwardBatch
) -> tuple[jax.Array, KVCache, tuple[jax.Array, ...]]:
    """The layers of a segment.

    Args:
        leaves: parameters of all its layers, one after the other.
        kv_cache: entries of its layers.

    Returns:
        Hidden states, cache, and if there are layers with experts, the rows that each expert of them got, int32
        ``[L, E]``; else nothing.
    """
    valid_T = valid_tokens(batch)
    new_cache = []
    rows: list[jax.Array] = []
    start = 0
    for part, rope, kv in zip(kind.layers, kind.ropes, kv_cache, strict=True):
        stop = start + len(part.keys)
        x_TD, kv, of_layer = _run_layer(part, leaves[start:stop], x_TD, ropes[rope], kv, batch, valid_T)
        new_cache.append(kv)
        rows += of_layer
        start = stop
    return x_TD, tuple(new_cache), (jnp.stack(rows),) if rows else ()


# Jitted inside the segment's trace: equal layers are traced and lowered once and inlined by the compiler, which halves
# the time of a start with a warm compilation cache.
@partial(jax.jit, static_argnums=0)
def _run_layer(
    part: ModulePart,
    leaves: Leaves,
    x_TD: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    kv: LayerKV,
    batch: ForwardBatch,
    valid_T: jax.Array,
) -> tuple[jax.Array, LayerKV, tuple[jax.Array, ...]]:
    layer = part.merge(leaves)
    assert isinstance(layer, DecoderLayer)
    return layer(x_TD, rope, kv, batch, valid_T)


def shapes_of(params: Mapping[str, nnx.Param]) -> dict[str, Any]:
    """Dtype and shape of each parameter of abstract modules."""
    return {path: param.get_value() for path, param in params.items()}


def abstract_part(
    module: nnx.Module, prefix: str, params: dict[str, nnx.Param]
) -> tuple[ModulePart, tuple[str, ...]]:
    """The static half of an abstract module; notes its parameters under their global paths."""
    graphdef, state = nnx.split(module)
    flat = list(nnx.to_flat_state(state))
    keys = tuple(key for key, _ in flat)
    paths = tuple(f"{prefix}." + ".".join(map(str, key)) for key in keys)
    params.update({path: param for path, (_, param) in zip(paths, flat)})
    return ModulePart(graphdef, keys), paths


def _embed(
    config: TransformerConfig,
    part: ModulePart,
    ropes: tuple[RopeConfig, ...],
    dtype: jnp.dtype,
    max_model_len: int,
    leaves: Leaves,
    batch: ForwardBatch,
) -> tuple[jax.Array, Ropes]:
    embed = part.merge(leaves)
    assert isinstance(embed, Embedding)
    x_TD = embed(batch.token_ids_T, config.embedding_scale, dtype)
    return x_TD, _ropes(ropes, max_model_len, batch)


def _ropes(ropes: tuple[RopeConfig, ...], max_model_len: int, batch: ForwardBatch) -> Ropes:
    tables = rope_tables_of(ropes, batch, max_model_len)
    return tuple(tables[rope] for rope in ropes)


def _head(
    config: TransformerConfig,
    norm_part: ModulePart,
    output_part: ModulePart,
    leaves: Leaves,
    hidden_PD: jax.Array,
) -> jax.Array:
    return _output(config, norm_part, output_part, leaves, _final_norm(norm_part, leaves, hidden_PD))


def _output(
    config: TransformerConfig,
    norm_part: ModulePart,
    output_part: ModulePart,
    leaves: Leaves,
    normalised_PD: jax.Array,
) -> jax.Array:
    output = output_part.merge(leaves[len(norm_part.keys) :])
    assert isinstance(output, Embedding | Linear)
    return head_logits(config, output, normalised_PD)


def _final_norm(norm_part: ModulePart, leaves: Leaves, hidden_PD: jax.Array) -> jax.Array:
    norm = norm_part.merge(leaves[: len(norm_part.keys)])
    assert isinstance(norm, RMSNorm)
    return norm(hidden_PD)
