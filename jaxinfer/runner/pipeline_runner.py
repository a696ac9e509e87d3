"""The runner of a model whose layers are spread over stages, each with devices of its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch.builder import BatchBuilder, StepArrays
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.kv_cache.layout import KVCache
from jaxinfer.kv_cache.manager import BlockCopy, SlotMove
from jaxinfer.runner.block_copies import copy_blocks, move_slots
from jaxinfer.runner.device_sampler import Admission, DeviceSampler, admissions
from jaxinfer.runner.programs import ExpertRows, ModelPrograms
from jaxinfer.runner.protocol import Masks, StepResult
from jaxinfer.runner.step_tail import JaxHandle, StepTail
from jaxinfer.scheduler.plan import StepPlan
from sharding.layout import WHOLE, Layout
from sharding.stages import Observer, StageLine


@dataclass
class Stage:
    """Consecutive layers, their K and V, and the devices that have them.

    Attributes:
        programs: of these layers; those of the first stage embed, those of the last have the head.
        kv_cache: of these layers, as of the last step that the stage dispatched.
    """

    programs: ModelPrograms
    kv_cache: KVCache
    layout: Layout


@dataclass(frozen=True)
class _Step:
    """A step on its way through the stages."""

    plan: StepPlan
    arrays: StepArrays
    slots: np.ndarray
    admitted: list[Admission]
    masks: "Future[Masks]" = field(default_factory=Future)


@dataclass(frozen=True)
class _Computed:
    """What the stages up to here made of a step: hidden states, and what experts got."""

    x_TD: jax.Array | None = None
    rows: tuple[ExpertRows, ...] = ()


_NOTHING = _Computed()


@dataclass(frozen=True)
class _Moves:
    """Moves of K and V, on their way through the stages."""

    moves: tuple[SlotMove, ...]


@dataclass(frozen=True)
class _PipelineHandle:
    done: "Future[JaxHandle]"

    def result(self) -> StepResult:
        return self.done.result().result()


@dataclass(frozen=True)
class _BegunStep:
    step: _Step
    done: "Future[JaxHandle]"

    def sample(self, masks: Masks) -> _PipelineHandle:
        self.step.masks.set_result(masks)
        return _PipelineHandle(self.done)


class PipelineRunner:
    """Dispatches steps into a line of stages. Each stage computes the steps in the order of their dispatch.

    Token ids are known on the host when a step is dispatched: no sequence is in two steps in flight (``EngineCore``).

    Args:
        sampler: on the devices of the last stage.
        observe: told when a stage was busy with dispatching.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        plan: CompilePlan,
        sampler: DeviceSampler,
        *,
        hidden_size: int,
        dtype: jnp.dtype,
        observe: Observer | None = None,
    ) -> None:
        assert len(stages) > 1
        self._stages = list(stages)
        self._plan = plan
        self._sampler = sampler
        self._tail = StepTail(stages[-1].programs, sampler)
        last = stages[-1].layout
        self._hidden = last.make(lambda: jnp.zeros((plan.token_buckets[-1], hidden_size), dtype), WHOLE)
        slots = plan.max_num_seqs + 1
        self._no_tokens_W = stages[0].layout.make(lambda: jnp.zeros(slots, jnp.int32), WHOLE)
        self._line = StageLine([partial(self._run, index) for index in range(len(stages))], observe)

    @property
    def kv_cache(self) -> KVCache:
        """The device arrays of all layers; for tests and tools, while nothing is in flight."""
        return tuple(layer for stage in self._stages for layer in stage.kv_cache)

    def dispatch(self, plan: StepPlan, arrays: StepArrays) -> _PipelineHandle:
        return self.begin(plan, arrays).sample({})

    def begin(self, plan: StepPlan, arrays: StepArrays) -> _BegunStep:
        step = _Step(plan, arrays, self._sampler.slots(arrays), admissions(plan))
        return _BegunStep(step, self._line.submit((step, _NOTHING)))

    def move(self, moves: Sequence[SlotMove]) -> None:
        self._line.submit((_Moves(tuple(moves)), _NOTHING))

    def warm_up(self, builder: BatchBuilder, progress: Callable[[int, int], None] | None = None) -> None:
        """Runs every program of the plan once, on padding; see ``JaxRunner.warm_up``."""
        runs: list[Callable[[], object]] = [
            partial(self._through, builder.empty(bucket)) for bucket in self._plan.token_buckets
        ]
        runs += self._sampler.warm_ups(lambda index_P: self._tail.logits(self._hidden)(index_P))
        runs.append(lambda: self._tail.programs.pool(self._hidden, 0, 0))
        runs += [partial(self._copy, stage, (BlockCopy(0, 0, 0),)) for stage in self._stages]
        if self._plan.moved_slots:
            runs += [partial(self._move, stage, (SlotMove(0, 0, 0),)) for stage in self._stages]
        for done, run in enumerate(runs, start=1):
            run()
            if progress is not None:
                progress(done, len(runs))
        jax.block_until_ready(self.kv_cache)

    # ---- a stage

    def _run(
        self, index: int, item: tuple[_Step | _Moves, _Computed]
    ) -> tuple[_Step | _Moves, _Computed] | JaxHandle:
        what, before = item
        stage, last = self._stages[index], index + 1 == len(self._stages)
        if isinstance(what, _Moves):
            self._move(stage, what.moves)
            return what, _NOTHING
        if what.plan.copies:
            self._copy(stage, what.plan.copies)
        x_TD, rows = self._layers(stage, what.arrays, before.x_TD)
        rows = before.rows + rows
        if not last:
            return what, _Computed(x_TD, rows)
        self._sampler.prepare(what.admitted)
        self._hidden = stage.programs.store(self._hidden, x_TD)
        masks = what.masks.result()
        return self._tail.finish(self._hidden, rows, what.plan, what.arrays, what.slots, masks)

    def _layers(
        self, stage: Stage, arrays: StepArrays, x_TD: jax.Array | None
    ) -> tuple[jax.Array, tuple[ExpertRows, ...]]:
        """The stage's layers: hidden states, and what experts got.

        Args:
            x_TD: what the stage before computed, on its devices; None in the first stage, which embeds.
        """
        programs, bucket = stage.programs, arrays.token_bucket
        packed = stage.layout.bring(arrays.packed)  # a program runs where its arguments are
        if x_TD is None:
            x_TD, ropes, batch = programs.embed(self._no_tokens_W, packed, bucket)
        else:
            x_TD = stage.layout.bring(x_TD)
            ropes, batch = programs.unpack(packed, bucket)
        stage.kv_cache, x_TD, rows = programs.layers(stage.kv_cache, x_TD, ropes, batch)
        return x_TD, rows

    def _through(self, arrays: StepArrays) -> None:
        x_TD, _ = self._layers(self._stages[0], arrays, None)
        for stage in self._stages[1:]:
            x_TD, _ = self._layers(stage, arrays, x_TD)
        self._hidden = self._stages[-1].programs.store(self._hidden, x_TD)

    def _copy(self, stage: Stage, copies: tuple[BlockCopy, ...]) -> None:
        stage.kv_cache = copy_blocks(stage.programs.copies, stage.kv_cache, copies, self._plan)

    def _move(self, stage: Stage, moves: Sequence[SlotMove]) -> None:
        stage.kv_cache = move_slots(stage.programs.copies, stage.kv_cache, moves, self._plan)
