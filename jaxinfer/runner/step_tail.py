"""What follows the layers of a step: samples, scores of prompt tokens, pooled hidden states."""

from dataclasses import dataclass

import jax
import numpy as np

from jaxinfer.batch.builder import StepArrays
from jaxinfer.runner.device_sampler import DeviceSampler, LogitsOf, PendingScores, SampledStep
from jaxinfer.runner.programs import ExpertRows, ModelPrograms
from jaxinfer.runner.protocol import ExpertLoad, Masks, StepResult, pooled_positions, scored_range
from jaxinfer.scheduler.plan import StepPlan


@dataclass(frozen=True)
class JaxHandle:
    """A step whose results are on their way to the host."""

    sampled: SampledStep
    scores: dict[int, PendingScores]
    pooled: dict[int, jax.Array]
    rows: tuple[ExpertRows, ...] = ()

    def result(self) -> StepResult:
        tokens, healthy, logprobs = self.sampled.fetch()
        scores = {i: score.fetch() for i, score in self.scores.items()}
        pooled = {i: np.asarray(x) for i, x in self.pooled.items()}
        return StepResult(tokens, healthy, logprobs, scores, pooled, self._experts())

    def _experts(self) -> ExpertLoad | None:
        if not self.rows:
            return None
        layers = tuple(layer for rows in self.rows for layer in rows.layers)
        return ExpertLoad(layers, np.concatenate([np.asarray(rows.rows_LE) for rows in self.rows]))


@dataclass(frozen=True)
class StepTail:
    """The programs behind the layers, and the sampler."""

    programs: ModelPrograms
    sampler: DeviceSampler

    def finish(
        self,
        hidden_XD: jax.Array,
        rows: tuple[ExpertRows, ...],
        plan: StepPlan,
        arrays: StepArrays,
        slots: np.ndarray,
        masks: Masks,
    ) -> JaxHandle:
        """Dispatches all that a step yields.

        Args:
            hidden_XD: buffer with the step's hidden states; it may be overwritten once this has returned.
            rows: what experts got. The copies to the host start here, so nobody waits for them when the step is done.
            slots: of the sampled rows, see ``DeviceSampler.slots``.
        """
        for of_segment in rows:
            of_segment.rows_LE.copy_to_host_async()
        sampled = self.sampler.sample(arrays, slots, self.logits(hidden_XD), masks)
        scores: dict[int, PendingScores] = {}
        pooled: dict[int, jax.Array] = {}
        offset = 0
        for index, row in enumerate(plan.rows):
            if row.seq.reads_prompt:
                if len(range(*scored_range(row))):
                    scores[index] = self.sampler.score(row, self.logits(hidden_XD, offset))
                if positions := pooled_positions(row):
                    first = offset + positions.start - row.start
                    pooled[index] = self.programs.pool(hidden_XD, first, first + len(positions))
            offset += row.num_tokens
        return JaxHandle(sampled, scores, pooled, rows)

    def logits(self, hidden_XD: jax.Array, offset: int = 0) -> LogitsOf:
        """Logits of tokens by their index relative to a row that starts at ``offset`` in the batch."""
        return lambda index_P: self.programs.head(hidden_XD, (index_P + offset).astype(np.int32))
