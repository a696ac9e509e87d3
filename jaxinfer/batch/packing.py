"""One int32 vector for all host data of a step: one transfer instead of one per array."""

import math
from dataclasses import dataclass

import jax
import numpy as np

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.forward_batch import ForwardBatch


@dataclass(frozen=True)
class Packing:
    """Where the arrays of a ``ForwardBatch`` lie in the packed vector; a function of the plan and T."""

    shapes: tuple[tuple[int, ...], ...]
    num_groups: int

    @classmethod
    def make(cls, plan: CompilePlan, token_bucket: int) -> "Packing":
        T, R = token_bucket, plan.table_rows(token_bucket)
        per_group = ((R, plan.table_width),) * plan.num_groups + ((T,),) * plan.num_groups
        tree = ((T, plan.tree_words),) if plan.tree_words else ()
        return cls(((T,), (T,), (R + 1,), (R,), *per_group, *tree), plan.num_groups)

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def views(self, packed: np.ndarray) -> list[np.ndarray]:
        """Writable views into a packed numpy vector, in the order of ``shapes``."""
        return [packed[start:stop].reshape(shape) for start, stop, shape in self._spans()]

    def unpack(self, packed: jax.Array) -> ForwardBatch:
        """The batch, inside a trace."""
        parts = [packed[start:stop].reshape(shape) for start, stop, shape in self._spans()]
        tables, rest = tuple(parts[4 : 4 + self.num_groups]), parts[4 + self.num_groups :]
        slots, tree = tuple(rest[: self.num_groups]), rest[self.num_groups :]
        return ForwardBatch(parts[0], parts[1], parts[2], parts[3], tables, slots, *tree)

    def _spans(self) -> list[tuple[int, int, tuple[int, ...]]]:
        spans, start = [], 0
        for shape in self.shapes:
            stop = start + math.prod(shape)
            spans.append((start, stop, shape))
            start = stop
        return spans
