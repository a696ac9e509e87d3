"""A runner whose logits the test decides; sampler, scheduler and block pool are the real ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxinfer.batch.builder import StepArrays
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.kv_cache.manager import SlotMove
from jaxinfer.request import Request
from jaxinfer.runner.device_sampler import DeviceSampler, SampledStep, admissions
from jaxinfer.runner.pooled_stand_in import pooled_stand_in
from jaxinfer.runner.protocol import Masks, ScoredChunk, StepResult, scored_range
from jaxinfer.sampling.typical import Typical
from jaxinfer.scheduler.plan import ScheduledRow, StepPlan

Script = Callable[[Request, int, int], np.ndarray]
"""(request, choice index, position) -> float32 logits [V] for the token at that position."""


@dataclass(frozen=True)
class _ScriptedHandle:
    sampled: SampledStep
    scores: dict[int, ScoredChunk]
    pooled: dict[int, np.ndarray]

    def result(self) -> StepResult:
        tokens, healthy, logprobs = self.sampled.fetch()
        return StepResult(tokens, healthy, logprobs, self.scores, self.pooled)


@dataclass(frozen=True)
class _BegunStep:
    sample: Callable[[Masks], _ScriptedHandle]


class ScriptedRunner:
    """Runs the real sampler on logits that a script gives by position.

    Args:
        script: what the model would say.
        record: if given, every step's plan is appended to it.
        typical: lossy acceptance of drafts.
    """

    def __init__(
        self,
        script: Script,
        vocab_size: int,
        plan: CompilePlan,
        eos_token_ids: tuple[int, ...] = (),
        record: list[StepPlan] | None = None,
        typical: Typical | None = None,
    ) -> None:
        self.script = script
        self._sampler = DeviceSampler(vocab_size, plan, eos_token_ids, typical=typical)
        self._record = record

    def dispatch(self, plan: StepPlan, arrays: StepArrays) -> _ScriptedHandle:
        return self.begin(plan, arrays).sample({})

    def begin(self, plan: StepPlan, arrays: StepArrays) -> _BegunStep:
        if self._record is not None:
            self._record.append(plan)
        self._sampler.prepare(admissions(plan))
        slots = self._sampler.slots(arrays)
        return _BegunStep(lambda masks: self._finish(plan, arrays, slots, masks))

    def move(self, moves: Sequence[SlotMove]) -> None:
        """There are no K and V."""

    def _finish(self, plan: StepPlan, arrays: StepArrays, slots: np.ndarray, masks: Masks) -> _ScriptedHandle:
        logits = [
            self._logits(row, position)
            for row, position in zip(arrays.samples.rows, arrays.samples.positions.tolist())
        ]
        sampled = self._sampler.sample(
            arrays, slots, lambda index_P: self._stack(logits, len(index_P)), masks
        )
        scores = {i: self._score(row) for i, row in enumerate(plan.rows) if len(range(*scored_range(row)))}
        return _ScriptedHandle(sampled, scores, pooled_stand_in(plan))

    def _score(self, row: ScheduledRow) -> ScoredChunk:
        first, stop = scored_range(row)
        logits = [self._logits(row, position) for position in range(first, stop)]
        return self._sampler.score(
            row, lambda index_P: jnp.asarray(np.stack([logits[i] for i in index_P]))
        ).fetch()

    def _logits(self, row: ScheduledRow, position: int) -> np.ndarray:
        return self.script(row.seq.request, row.seq.index, position)

    def _stack(self, logits: list[np.ndarray], bucket: int) -> jnp.ndarray:
        logits = logits[:bucket]
        padding = [np.zeros_like(logits[0])] * (bucket - len(logits))
        return jnp.asarray(np.stack(logits + padding), jnp.float32)
