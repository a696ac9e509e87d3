"""Fills the parameters of a model from a checkpoint, one at a time."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import jax
import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.load_plan import EMBEDDING, HEAD, LoadPlan, make_plan
from jaxinfer.checkpoints.stored_form import StoredForm, read_packed
from jaxinfer.checkpoints.tensor_source import TensorSource
from jaxinfer.checkpoints.values import check_dtype, page_aligned, read_into
from jaxinfer.checkpoints.weight_map import Source, WeightMap
from pallas_kernels.linear.packed import PackedWeight

logger = logging.getLogger(__name__)

Struct = jax.ShapeDtypeStruct | PackedWeight
Param = jax.Array | PackedWeight
Place = Callable[[str, np.ndarray | PackedWeight], Param]
Progress = Callable[[int, int], None]
T = TypeVar("T")
READERS = 2
"""Parameters that are read at the same time: dequantizing and checking take longer than the disk."""
_MAX_LISTED = 50


def load_params(
    shapes: Mapping[str, Struct],
    weight_map: WeightMap,
    source: TensorSource,
    place: Place,
    progress: Progress | None = None,
    forms: Mapping[str, StoredForm] | None = None,
    unused: tuple[str, ...] = (),
) -> dict[str, Param]:
    """Reads, joins, casts, checks and places every parameter.

    Beside what ``place`` keeps, ``READERS`` parameters are on the host at a time, and a few MB of blocks.

    Rules:
        - Tensors that belong to no parameter are an error, except those of ``unused``, rotary buffers, the towers of
          other modalities, and an ``lm_head.weight`` that the model does not use because its embeddings are tied:
          that one is skipped, with a warning if it differs from the embedding.
        - An embedding or head with more rows than the vocabulary loses the surplus; fewer rows are an error.
        - ``Source.add`` is added in float32, before the cast.

    Args:
        shapes: shape and dtype (float32, float16 or bfloat16) of each parameter by path; of those in ``forms`` the
            shape only is used.
        weight_map: source of each of these parameters.
        place: puts a host array on the devices. The array is not written again, so it may be kept without a
            copy.
        progress: called after each parameter with the bytes placed so far and in total.
        forms: parameters that are packed in the form in which they are stored, see ``stored_forms``.
        unused: beginnings of the names of tensors that the family is known not to use.

    Raises:
        CheckpointError: lists every problem with file and tensor. Names and shapes are checked before
            anything is read; non-finite values, also those a cast creates, are found while reading.
    """
    plan = make_plan(shapes, weight_map, source, unused)
    _raise_if(plan.problems)
    _report(plan, source)
    total = sum(num_bytes(struct) for struct in shapes.values())
    params: dict[str, Param] = {}
    problems: list[str] = []
    done = 0
    with ThreadPoolExecutor(READERS, thread_name_prefix="weights") as readers:

        def read(path: str) -> tuple[np.ndarray | PackedWeight, list[str]]:
            if forms is not None and path in forms:
                return read_packed(forms[path], source)
            return _assemble(weight_map[path], shapes[path], source, path in plan.filled)

        for path, (weight, found) in _in_order(readers, read, list(shapes)):
            problems += found
            if not problems:
                params[path] = place(path, weight)
                # A transfer still running would keep this array alive beside the next ones.
                jax.block_until_ready(params[path])
            del weight
            done += num_bytes(shapes[path])
            if progress is not None:
                progress(done, total)
    _raise_if(problems)
    return params


def _in_order(
    pool: ThreadPoolExecutor, function: Callable[[str], T], paths: Sequence[str]
) -> Iterator[tuple[str, T]]:
    """Results in the order of the paths, computed at most ``READERS`` ahead."""
    pending: deque[tuple[str, Future[T]]] = deque()
    for path in paths:
        if len(pending) == READERS:
            first, future = pending.popleft()
            yield first, future.result()
        pending.append((path, pool.submit(function, path)))
    for path, future in pending:
        yield path, future.result()


def num_bytes(struct: Struct) -> int:
    """Bytes that a parameter takes."""
    return sum(
        int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(struct)
    )


def _raise_if(problems: Sequence[str]) -> None:
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems[:_MAX_LISTED])
        more = f"\n  and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise CheckpointError(
            f"the checkpoint does not fit the model ({len(problems)} problems):\n{listed}{more}"
        )


def _report(plan: LoadPlan, source: TensorSource) -> None:
    if plan.skipped:
        logger.info("%d tensors are not needed and skipped: %s", len(plan.skipped), list(plan.skipped[:10]))
    for path in plan.padded:
        logger.warning("parameter %s: rows beyond the vocabulary are dropped", path)
    if plan.redundant_head and not _equal(source, HEAD, EMBEDDING):
        logger.warning(
            "%s: %r differs from the embedding, but the configuration ties them: it is not used",
            source.origin(HEAD),
            HEAD,
        )


def _equal(source: TensorSource, first: str, second: str) -> bool:
    """Compares two tensors block by block; blocks may differ in size if the stored types do."""
    if source.info(first).shape != source.info(second).shape:
        return False
    others = source.chunks(second)
    rest = next(others)
    for block in source.chunks(first):
        while rest.shape[0] < block.shape[0]:
            rest = np.concatenate([rest, next(others)])
        if not np.array_equal(block.astype(np.float32), rest[: block.shape[0]].astype(np.float32)):
            return False
        rest = rest[block.shape[0] :] if rest.shape[0] > block.shape[0] else next(others, rest[:0])
    return True


def _assemble(
    origin: Source, struct: Struct, source: TensorSource, filled: bool
) -> tuple[np.ndarray, list[str]]:
    """Builds one parameter on the host; returns it with the problems found in its values."""
    assert isinstance(struct, jax.ShapeDtypeStruct)
    dtype = np.dtype(struct.dtype)
    check_dtype(dtype)
    if filled:
        return np.full(struct.shape, origin.fill, dtype), []
    target = page_aligned(struct.shape, dtype)
    problems: list[str] = []
    for index, part in enumerate(origin.parts):
        into = target[index] if len(origin.parts) > 1 else np.atleast_1d(target)
        problems += read_into(into, part, source, origin.add, origin.rows)
    return target, problems
