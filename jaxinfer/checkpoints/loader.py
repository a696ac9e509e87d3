"""Fills the parameters of a model from a checkpoint, one at a time."""

import logging
import mmap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.load_plan import EMBEDDING, HEAD, LoadPlan, make_plan
from jaxinfer.checkpoints.tensor_source import TensorSource
from jaxinfer.checkpoints.weight_map import Source, WeightMap

logger = logging.getLogger(__name__)

Place = Callable[[str, np.ndarray], jax.Array]
Progress = Callable[[int, int], None]
T = TypeVar("T")
READERS = 2
"""Parameters that are read at the same time: dequantizing and checking take longer than the disk."""
_MAX_LISTED = 50
# Exponent bits all set: infinite or NaN. Comparing as integers is several times faster than isfinite in 16
# bits.
_INFINITY_BITS = {
    "float32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "float16": (np.uint16, 0x7FFF, 0x7C00),
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
}


def load_params(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    weight_map: WeightMap,
    source: TensorSource,
    place: Place,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Reads, joins, casts, checks and places every parameter.

    Beside what ``place`` keeps, ``READERS`` parameters are on the host at a time, and a few MB of blocks.

    Rules:
        - Tensors that belong to no parameter are an error, except rotary buffers, the towers of other
          modalities, and an ``lm_head.weight`` that the model does not use because its embeddings are tied:
          that one is skipped, with a warning if it differs from the embedding.
        - An embedding or head with more rows than the vocabulary loses the surplus; fewer rows are an error.
        - ``Source.add`` is added in float32, before the cast.

    Args:
        shapes: shape and dtype (float32, float16 or bfloat16) of each parameter by path.
        weight_map: source of each of these parameters.
        place: puts a host array on the devices. The array is not written again, so it may be kept without a
            copy.
        progress: called after each parameter with the bytes placed so far and in total.

    Raises:
        CheckpointError: lists every problem with file and tensor. Names and shapes are checked before
            anything is read; non-finite values, also those a cast creates, are found while reading.
    """
    plan = make_plan(shapes, weight_map, source)
    _raise_if(plan.problems)
    _report(plan, source)
    total = sum(_num_bytes(struct) for struct in shapes.values())
    params: dict[str, jax.Array] = {}
    problems: list[str] = []
    done = 0
    with ThreadPoolExecutor(READERS, thread_name_prefix="weights") as readers:

        def read(path: str) -> tuple[np.ndarray, list[str]]:
            return _assemble(weight_map[path], shapes[path], source, path in plan.filled)

        for path, (array_np, found) in _in_order(readers, read, list(shapes)):
            problems += found
            if not problems:
                params[path] = place(path, array_np)
                # A transfer still running would keep this array alive beside the next ones.
                jax.block_until_ready(params[path])
            del array_np
            done += _num_bytes(shapes[path])
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


def _num_bytes(struct: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(struct.shape, dtype=np.int64)) * np.dtype(struct.dtype).itemsize


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
    origin: Source, struct: jax.ShapeDtypeStruct, source: TensorSource, filled: bool
) -> tuple[np.ndarray, list[str]]:
    """Builds one parameter on the host; returns it with the problems found in its values."""
    dtype = np.dtype(struct.dtype)
    if dtype.name not in _INFINITY_BITS:
        raise CheckpointError(f"parameters can be {', '.join(_INFINITY_BITS)}, not {dtype.name}")
    if filled:
        return np.full(struct.shape, origin.fill, dtype), []
    target = _page_aligned(struct.shape, dtype)
    problems: list[str] = []
    for index, part in enumerate(origin.parts):
        row = 0
        into = target[index] if len(origin.parts) > 1 else np.atleast_1d(target)
        for name in part:
            bad = _Values(dtype)
            for block in source.chunks(name):
                rows = into[row : row + block.shape[0]]
                bad.copy(rows, block[: rows.shape[0]], origin.add)
                row += rows.shape[0]
            problems += bad.problems(name, source)
    return target, problems


def _page_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array in pages of its own: JAX on CPUs adopts it without a copy, and freeing it returns them."""
    size = int(np.prod(shape, dtype=np.int64))
    pages = mmap.mmap(-1, max(1, size * dtype.itemsize))
    return np.frombuffer(pages, dtype, size).reshape(shape)


class _Values:
    """Copies the blocks of one tensor and remembers whether their values survive the cast."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._bits, self._mask, self._infinity = _INFINITY_BITS[dtype.name]
        self._stored_bad = False
        self._largest = 0.0

    def copy(self, rows: np.ndarray, block: np.ndarray, add: float) -> None:
        if add:
            block = block.astype(np.float32) + np.float32(add)
        with np.errstate(over="ignore", invalid="ignore"):  # checked below
            rows[...] = block
        bits = np.ascontiguousarray(rows).view(self._bits) & self._mask
        if bits.size and int(bits.max()) >= self._infinity:
            values = block.astype(np.float64)
            finite = np.isfinite(values)
            self._stored_bad |= not finite.all()
            self._largest = max(self._largest, float(np.abs(values[finite]).max(initial=0.0)))

    def problems(self, name: str, source: TensorSource) -> Iterator[str]:
        where = f"tensor {name!r} in {source.origin(name)}"
        if self._stored_bad:
            yield f"{where} holds NaN or infinite values"
        elif self._largest:
            limit = float(jax.numpy.finfo(self._dtype).max)
            yield (
                f"{where}: values up to {self._largest:.4g} become infinite in {self._dtype.name}, "
                f"whose largest is {limit:.4g}"
            )
