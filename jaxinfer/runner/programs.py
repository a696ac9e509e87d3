"""The compiled programs of a model: embedding, layer segments, head, block copy. Pure functions over flat tuples."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.batch.packing import Packing
from jaxinfer.kv_cache.layout import KVCache, kv_partition
from jaxinfer.models.segments import Leaves, Param, Ropes, Segment, SegmentedModel, SegmentKind, run_segment
from jaxinfer.runner.block_copies import PoolCopies
from sharding.layout import ONE_DEVICE, WHOLE, Layout


@dataclass(frozen=True)
class StepFunctions:
    """The jitted functions of a model, without weights. KV cache and hidden states are donated, nothing else.

    Attributes:
        segments: one per kind of segment; equal segments share it.
    """

    embed: Callable[..., tuple[jax.Array, Ropes, ForwardBatch]]
    unpack: Callable[[jax.Array | np.ndarray, int], tuple[Ropes, ForwardBatch]]
    segments: dict[SegmentKind, jax.stages.Wrapped]
    store: Callable[[jax.Array, jax.Array], jax.Array]
    head: jax.stages.Wrapped
    pool: Callable[[Leaves, jax.Array, np.ndarray], jax.Array]
    copies: PoolCopies

    @classmethod
    def make(
        cls, model: SegmentedModel, plan: CompilePlan, groups: tuple[int, ...], layout: Layout = ONE_DEVICE
    ) -> Self:
        """Args:
        groups: KV group of each layer.
        layout: where parameters and cache are; hidden states are whole on each device.
        """
        head = model.specs(model.head_paths, layout)
        logits = layout.rules.spec((None, "vocab"))
        return cls(
            embed=jax.jit(partial(_embed_step, model, plan, layout), static_argnums=(3,)),
            unpack=jax.jit(partial(_unpack_step, model, plan, layout), static_argnums=(1,)),
            segments={segment.kind: _segment(model, segment, layout) for segment in model.segments},
            store=jax.jit(layout.spread(_store, WHOLE, WHOLE), donate_argnums=(0,)),
            head=jax.jit(layout.spread(partial(_head, model.head), (head, WHOLE, WHOLE), logits)),
            pool=jax.jit(layout.spread(partial(_pool, model.final_norm), (head, WHOLE, WHOLE), WHOLE)),
            copies=PoolCopies.make(groups, layout),
        )

    def compile_head(
        self,
        model: SegmentedModel,
        hidden_XD: jax.ShapeDtypeStruct,
        rows: int,
        layout: Layout = ONE_DEVICE,
    ) -> None:
        """Compiles the head for so many rows from shapes alone; the first call finds it compiled."""
        self.head.lower(
            model.placed_structs(model.head_paths, layout),
            layout.struct(hidden_XD, WHOLE),
            jax.ShapeDtypeStruct((rows,), np.int32),
        ).compile()


@dataclass(frozen=True)
class ExpertRows:
    """Rows of a step that experts got, on the device: int32 ``[L, E]``, of these layers of the model."""

    layers: tuple[int, ...]
    rows_LE: jax.Array


@dataclass(frozen=True)
class SegmentProgram:
    """One segment with its weights bound to a program that equal segments share."""

    run: Callable[..., tuple[jax.Array, KVCache, tuple[jax.Array, ...]]]
    leaves: Leaves
    first: int
    stop: int
    sparse: tuple[int, ...]


class ModelPrograms:
    """A loaded model: jitted functions with weights bound to them.

    Args:
        params: parameters by path.
    """

    def __init__(self, model: SegmentedModel, params: dict[str, Param], functions: StepFunctions) -> None:
        self._functions = functions
        self._embed_leaves = tuple(params[path] for path in model.embed_paths)
        self._head_leaves = tuple(params[path] for path in model.head_paths)
        self._segments = [
            SegmentProgram(
                functions.segments[segment.kind],
                tuple(params[path] for path in segment.paths),
                segment.first,
                segment.first + segment.num_layers,
                segment.sparse,
            )
            for segment in model.segments
        ]

    def backbone(
        self,
        kv_cache: KVCache,
        hidden_XD: jax.Array,
        newest_W: jax.Array,
        packed: np.ndarray,
        token_bucket: int,
        capture: Callable[[int, jax.Array], None] | None = None,
        computed: Callable[[int, KVCache], None] | None = None,
    ) -> tuple[KVCache, jax.Array, tuple[ExpertRows, ...]]:
        """Runs all layers of a step.

        Args:
            capture: called with the first layer of each segment and what goes into it, which the segment overwrites.
            computed: called with the first layer of each segment and its part of the cache, when it was dispatched.

        Returns:
            The cache; the buffer whose first T rows are the step's hidden states before the final norm; and what
            experts got. The buffer has one size for all T, so head programs do not depend on T.
        """
        x_TD, ropes, batch = self.embed(newest_W, packed, token_bucket)
        kv_cache, x_TD, rows = self.layers(kv_cache, x_TD, ropes, batch, capture, computed)
        return kv_cache, self.store(hidden_XD, x_TD), rows

    def embed(
        self, newest_W: jax.Array, packed: jax.Array | np.ndarray, token_bucket: int
    ) -> tuple[jax.Array, Ropes, ForwardBatch]:
        """What goes into the first layer, and what all layers read."""
        return self._functions.embed(self._embed_leaves, newest_W, packed, token_bucket)

    def unpack(self, packed: jax.Array | np.ndarray, token_bucket: int) -> tuple[Ropes, ForwardBatch]:
        """What all layers read, where another stage embeds."""
        return self._functions.unpack(packed, token_bucket)

    def layers(
        self,
        kv_cache: KVCache,
        x_TD: jax.Array,
        ropes: Ropes,
        batch: ForwardBatch,
        capture: Callable[[int, jax.Array], None] | None = None,
        computed: Callable[[int, KVCache], None] | None = None,
    ) -> tuple[KVCache, jax.Array, tuple[ExpertRows, ...]]:
        """All layers that are here; see ``backbone``."""
        new_cache = list(kv_cache)
        rows: list[ExpertRows] = []
        for segment in self._segments:
            if capture is not None:
                capture(segment.first, x_TD)
            part = kv_cache[segment.first : segment.stop]
            x_TD, part, of_segment = segment.run(segment.leaves, part, x_TD, ropes, batch)
            new_cache[segment.first : segment.stop] = part
            rows += [ExpertRows(segment.sparse, rows_LE) for rows_LE in of_segment]
            if computed is not None:
                computed(segment.first, part)
        return tuple(new_cache), x_TD, tuple(rows)

    def store(self, hidden_XD: jax.Array, x_TD: jax.Array) -> jax.Array:
        """The buffer, which is donated, with the hidden states of a step in its first rows."""
        return self._functions.store(hidden_XD, x_TD)

    @property
    def first_layers(self) -> list[int]:
        """First layer of each segment."""
        return [segment.first for segment in self._segments]

    @property
    def embed_leaves(self) -> Leaves:
        return self._embed_leaves

    @property
    def head_leaves(self) -> Leaves:
        return self._head_leaves

    def head(self, hidden_XD: jax.Array, index_P: np.ndarray) -> jax.Array:
        """Float32 logits [P, V] of the given rows of the buffer."""
        return self._functions.head(self._head_leaves, hidden_XD, index_P)

    def pool(self, hidden_XD: jax.Array, first: int, stop: int) -> jax.Array:
        """Float32 sum [D] of the rows ``first`` to ``stop`` of the buffer, after the final norm."""
        return self._functions.pool(self._head_leaves, hidden_XD, np.array([first, stop], np.int32))

    @property
    def copies(self) -> PoolCopies:
        return self._functions.copies


def _segment(model: SegmentedModel, segment: Segment, layout: Layout) -> jax.stages.Wrapped:
    """The program of a kind of segment, made from one of them."""
    cache = (kv_partition(layout.rules),) * segment.num_layers
    in_specs = (model.specs(segment.paths, layout), cache, WHOLE, WHOLE, WHOLE)
    function = layout.spread(partial(run_segment, segment.kind), in_specs, (WHOLE, cache, WHOLE))
    return jax.jit(function, donate_argnums=(1, 2))


def _embed_step(
    model: SegmentedModel,
    plan: CompilePlan,
    layout: Layout,
    leaves: Leaves,
    newest_W: jax.Array,
    packed: jax.Array,
    token_bucket: int,
) -> tuple[jax.Array, Ropes, ForwardBatch]:
    function = partial(_embed, model.embed, plan, token_bucket)
    in_specs = (model.specs(model.embed_paths, layout), WHOLE, WHOLE)
    return layout.spread(function, in_specs, WHOLE)(leaves, newest_W, packed)


def _unpack_step(
    model: SegmentedModel, plan: CompilePlan, layout: Layout, packed: jax.Array, token_bucket: int
) -> tuple[Ropes, ForwardBatch]:
    def unpack(packed: jax.Array) -> tuple[Ropes, ForwardBatch]:
        batch = Packing.make(plan, token_bucket).unpack(packed)
        return model.ropes(batch), batch

    return layout.spread(unpack, (WHOLE,), WHOLE)(packed)


def _embed(
    embed: Callable[[Leaves, ForwardBatch], tuple[jax.Array, Ropes]],
    plan: CompilePlan,
    token_bucket: int,
    leaves: Leaves,
    newest_W: jax.Array,
    packed: jax.Array,
) -> tuple[jax.Array, Ropes, ForwardBatch]:
    batch = Packing.make(plan, token_bucket).unpack(packed)
    ids_T = batch.token_ids_T
    # A negative id names the batch slot whose newest token is meant.
    batch = replace(batch, token_ids_T=jnp.where(ids_T < 0, newest_W[jnp.maximum(-ids_T - 1, 0)], ids_T))
    return *embed(leaves, batch), batch


def _head(
    head: Callable[[Leaves, jax.Array], jax.Array], leaves: Leaves, hidden_XD: jax.Array, index_P: jax.Array
) -> jax.Array:
    return head(leaves, hidden_XD[index_P])


def _pool(
    final_norm: Callable[[Leaves, jax.Array], jax.Array],
    leaves: Leaves,
    hidden_XD: jax.Array,
    span_2: jax.Array,
) -> jax.Array:
    row_X = jnp.arange(hidden_XD.shape[0])
    wanted_X1 = ((row_X >= span_2[0]) & (row_X < span_2[1]))[:, None]
    normalised_XD = final_norm(leaves, hidden_XD.astype(jnp.float32))
    return jnp.where(wanted_X1, normalised_XD, 0).sum(0)  # other rows may hold anything, NaN included


def _store(hidden_XD: jax.Array, x_TD: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(hidden_XD, x_TD.astype(hidden_XD.dtype), (0, 0))
