"""The runner on a JAX device: the model's programs, the KV cache and the sampler."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch.builder import BatchBuilder, StepArrays
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.kv_cache.layout import KVCache
from jaxinfer.kv_cache.manager import BlockCopy, SlotMove
from jaxinfer.runner.block_copies import copy_blocks, move_slots
from jaxinfer.runner.block_transfers import BlockTransfers, replaced
from jaxinfer.runner.device_sampler import DeviceSampler, admissions
from jaxinfer.runner.follower import Follower, TargetStep
from jaxinfer.runner.programs import ExpertRows, ModelPrograms
from jaxinfer.runner.protocol import Masks
from jaxinfer.runner.step_tail import JaxHandle, StepTail
from jaxinfer.runner.timing import ProgramSeconds
from jaxinfer.scheduler.plan import BlockRead, StepPlan
from sharding.layout import ONE_DEVICE, WHOLE, Layout


@dataclass(frozen=True)
class _BegunStep:
    sample: Callable[[Masks], JaxHandle]


class JaxRunner:
    """Dispatches steps asynchronously; device order is dispatch order, so a block may change hands between steps."""

    def __init__(
        self,
        programs: ModelPrograms,
        kv_cache: KVCache,
        plan: CompilePlan,
        sampler: DeviceSampler,
        *,
        hidden_size: int,
        dtype: jnp.dtype,
        follower: Follower | None = None,
        layout: Layout = ONE_DEVICE,
        transfers: BlockTransfers | None = None,
    ) -> None:
        """Args:
        transfers: set if blocks leave the device or come to it, for other engines.
        """
        self._programs = programs
        self._kv_cache = kv_cache
        self._plan = plan
        self._sampler = sampler
        self._tail = StepTail(programs, sampler)
        self._follower = follower
        self._transfers = transfers
        hidden = (plan.token_buckets[-1], hidden_size)
        self._hidden = layout.make(lambda: jnp.zeros(hidden, dtype), WHOLE)

    @property
    def kv_cache(self) -> KVCache:
        """The device arrays as of the last dispatched step; for tests and tools."""
        return self._kv_cache

    def dispatch(self, plan: StepPlan, arrays: StepArrays) -> JaxHandle:
        return self.begin(plan, arrays).sample({})

    def begin(self, plan: StepPlan, arrays: StepArrays) -> _BegunStep:
        self._sampler.prepare(admissions(plan))
        if plan.copies:
            self._copy(plan.copies)
        rows = self._backbone(arrays, plan.reads)
        if self._follower is not None:
            self._follower.follow(TargetStep(plan, arrays, self._sampler.newest_W, self._hidden))
        slots = self._sampler.slots(arrays)
        return _BegunStep(lambda masks: self._tail.finish(self._hidden, rows, plan, arrays, slots, masks))

    def move(self, moves: Sequence[SlotMove]) -> None:
        self._move(moves)
        if self._follower is not None:
            self._follower.move(moves)

    def write_blocks(
        self, group: int, layers: tuple[int, ...], blocks: Sequence[int], contents: tuple[Any, ...]
    ) -> None:
        """See ``BlockWriter``."""
        assert self._transfers is not None, "this runner was not made to take blocks of other engines"
        part = tuple(self._kv_cache[layer] for layer in layers)
        part = self._transfers.put(part, layers, blocks, contents)
        self._kv_cache = replaced(self._kv_cache, layers, part)

    def warm_up(self, builder: BatchBuilder, progress: Callable[[int, int], None] | None = None) -> None:
        """Runs every program of the plan once, on padding.

        Args:
            progress: called with the number of programs done and in total.
        """
        runs: list[Callable[[], object]] = [
            partial(self._backbone, builder.empty(bucket)) for bucket in self._plan.token_buckets
        ]
        runs += self._sampler.warm_ups(self._logits)
        runs.append(lambda: self._programs.pool(self._hidden, 0, 0))
        runs.append(lambda: self._copy((BlockCopy(0, 0, 0),)))
        if self._plan.moved_slots:
            runs.append(lambda: self._move((SlotMove(0, 0, 0),)))
        if self._follower is not None:
            runs += self._follower.warm_ups(builder)
        if self._transfers is not None:
            warm_ups = self._transfers.warm_ups(self._kv_cache, self._programs.first_layers)
            runs += [partial(self._with_cache, run) for run in warm_ups]
        for done, run in enumerate(runs, start=1):
            run()
            if progress is not None:
                progress(done, len(runs))
        jax.block_until_ready(self._kv_cache)

    def time_programs(self, builder: BatchBuilder, largest: int) -> ProgramSeconds:
        """Runs the programs of steps of up to ``largest`` tokens on padding, after the warm-up; takes the faster of
        two runs of each."""
        layers = {
            bucket: min(self._seconds(partial(self._backbone, builder.empty(bucket))) for _ in range(2))
            for bucket in self._plan.token_buckets
            if bucket <= self._plan.tokens(min(largest, self._plan.token_buckets[-1]))
        }
        sampling = {
            bucket: min(self._seconds(run) for _ in range(2))
            for bucket, run in zip(self._plan.row_buckets, self._sampler.warm_ups(self._logits))
        }
        return ProgramSeconds(layers, sampling)

    def _seconds(self, run: Callable[[], object]) -> float:
        """Until the device is done with everything that was dispatched."""
        started = time.perf_counter()
        run()
        jax.block_until_ready((self._hidden, self._sampler.newest_W))
        return time.perf_counter() - started

    def _with_cache(self, run: Callable[[KVCache], KVCache]) -> None:
        self._kv_cache = run(self._kv_cache)

    def _backbone(self, arrays: StepArrays, reads: tuple[BlockRead, ...] = ()) -> tuple[ExpertRows, ...]:
        def computed(first: int, part: KVCache) -> None:
            assert self._transfers is not None, "this runner was not made to give blocks to other engines"
            for read in reads:
                self._transfers.take(read, first, part)

        self._kv_cache, self._hidden, rows = self._programs.backbone(
            self._kv_cache,
            self._hidden,
            self._sampler.newest_W,
            arrays.packed,
            arrays.token_bucket,
            None if self._follower is None else self._follower.capture,
            computed if reads else None,
        )
        return rows

    def _logits(self, index_P: np.ndarray) -> jax.Array:
        return self._tail.logits(self._hidden)(index_P)

    def _copy(self, copies: tuple[BlockCopy, ...]) -> None:
        self._kv_cache = copy_blocks(self._programs.copies, self._kv_cache, copies, self._plan)

    def _move(self, moves: Sequence[SlotMove]) -> None:
        self._kv_cache = move_slots(self._programs.copies, self._kv_cache, moves, self._plan)
