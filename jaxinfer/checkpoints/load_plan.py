"""Compares a checkpoint's headers with the parameters wanted, before any weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from jaxinfer.checkpoints.kv_scales import is_kv_scale
from jaxinfer.checkpoints.tensor_source import TensorSource
from jaxinfer.checkpoints.weight_map import Rows, Source, WeightMap
from pallas_kernels.linear.packed import PackedWeight

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_VOCABULARY_TENSORS = (EMBEDDING, HEAD)
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_BUFFERS = (".inv_freq", ".masked_bias", ".attn.bias", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
_OTHER_MODALITIES = (
    "vision_tower.",
    "multi_modal_projector.",
    "visual.",
    "audio_tower.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.visual.",
    "model.audio_tower.",
)


@dataclass(frozen=True)
class LoadPlan:
    """What headers say about a load.

    Attributes:
        problems: everything that is wrong, one line each; nothing can be loaded unless it is empty.
        filled: parameters that are absent and take their default value.
        skipped: tensors that are known to be useless here.
        redundant_head: the checkpoint has an output head that the model, with tied embeddings, does not use.
        padded: parameters whose tensor has more rows than the vocabulary; the surplus is dropped.
    """

    problems: tuple[str, ...]
    filled: frozenset[str]
    skipped: tuple[str, ...]
    redundant_head: bool
    padded: tuple[str, ...]


def make_plan(
    shapes: Mapping[str, jax.ShapeDtypeStruct | PackedWeight],
    weight_map: WeightMap,
    source: TensorSource,
    unused: tuple[str, ...] = (),
) -> LoadPlan:
    """Checks names, shapes and kinds of all tensors against all parameters; see ``LoadPlan``.

    Args:
        unused: beginnings of names that are known to be useless to this model.
    """
    names = frozenset(source.names())
    problems = [
        f"parameter {path!r} has no source in the weight map" for path in shapes if path not in weight_map
    ]
    problems += [
        f"the weight map fills {path!r}, which the model lacks" for path in weight_map if path not in shapes
    ]
    filled, padded, used = [], [], set()
    for path, origin in weight_map.items():
        wanted = [name for part in origin.parts for name in part]
        used.update(wanted)
        missing = [name for name in wanted if name not in names]
        if origin.optional and len(missing) == len(wanted):
            filled.append(path)
        elif missing:
            where = _location(source, names)
            problems += [f"tensor {name!r} is missing in {where} (needed for {path!r})" for name in missing]
        elif path in shapes:
            problems += _shape_problems(path, origin, shapes[path].shape, source)
            if surplus_rows(origin, shapes[path].shape, source):
                padded.append(path)
    extra = sorted(names - used)
    redundant_head = HEAD in extra and EMBEDDING in used
    skipped = [
        name
        for name in extra
        if name.startswith(unused) or _harmless(name) or (redundant_head and name == HEAD)
    ]
    problems += [
        f"tensor {name!r} in {source.origin(name)} belongs to no parameter"
        for name in extra
        if name not in skipped
    ]
    return LoadPlan(tuple(problems), frozenset(filled), tuple(skipped), redundant_head, tuple(padded))


def surplus_rows(origin: Source, shape: tuple[int, ...], source: TensorSource) -> int:
    """Rows that an embedding or head has beyond the vocabulary: padding, dropped at load."""
    if len(origin.parts) != 1 or len(origin.parts[0]) != 1 or origin.parts[0][0] not in _VOCABULARY_TENSORS:
        return 0
    stored = source.info(origin.parts[0][0]).shape
    same_width = len(stored) == len(shape) == 2 and stored[1] == shape[1]
    return max(0, stored[0] - shape[0]) if same_width else 0


def _harmless(name: str) -> bool:
    return name.endswith(_BUFFERS) or name.startswith(_OTHER_MODALITIES) or is_kv_scale(name)


def _location(source: TensorSource, names: frozenset[str]) -> str:
    """Where a tensor that is missing was looked for."""
    return source.origin(min(names)).split(" (as ")[0] if names else "a checkpoint without tensors"


def _shape_problems(path: str, origin: Source, shape: tuple[int, ...], source: TensorSource) -> list[str]:
    names = [name for part in origin.parts for name in part]
    unusable = [name for name in names if source.info(name).dtype.name not in _FLOATS]
    if unusable:
        return [
            f"tensor {name!r} in {source.origin(name)} is stored as {source.info(name).stored}; "
            f"only {', '.join(_FLOATS)} can be loaded"
            for name in unusable
        ]
    joined = [
        _joined_shape([_taken(source.info(name).shape, origin.rows) for name in part])
        for part in origin.parts
    ]
    expected = shape[1:] if len(origin.parts) > 1 else shape
    count_fits = len(origin.parts) == 1 or (shape and len(origin.parts) == shape[0])
    surplus = surplus_rows(origin, shape, source)
    if count_fits and (surplus or all(found == expected for found in joined)):
        return []
    texts = [f"{name!r} {list(source.info(name).shape)}" for name in names]
    listed = ", ".join(texts[:6]) + (", ..." if len(texts) > 6 else "")
    return [f"parameter {path!r} has shape {list(shape)}, but {source.origin(names[0])} holds {listed}"]


def _taken(shape: tuple[int, ...], rows: Rows | None) -> tuple[int, ...]:
    """Shape of the rows that are taken; that of the tensor if they are all, or it has no whole periods."""
    if rows is None or not shape or shape[0] % rows.period:
        return shape
    return (shape[0] // rows.period * (rows.stop - rows.start), *shape[1:])


def _joined_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Shape of a concatenation along the first axis; None if the other axes differ."""
    if len(shapes) == 1:
        return shapes[0]
    if len({shape[1:] for shape in shapes}) != 1 or () in shapes:
        return None
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])
