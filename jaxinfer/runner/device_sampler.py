"""The sampler of a runner: parameters of the batch slots, their state on the device, and the sampling programs."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinfer.batch.builder import StepArrays
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.request import Request
from jaxinfer.runner.protocol import LogprobRows, Masks, ScoredChunk, scored_range
from jaxinfer.runner.sampler_programs import sampler_programs
from jaxinfer.sampling.device import Draw
from jaxinfer.sampling.host import Drafts, SamplingTable
from jaxinfer.sampling.inputs import LogprobOutputs, SamplerOutputs
from jaxinfer.sampling.limits import MAX_LOGPROB_TOKEN_IDS
from jaxinfer.sampling.state import HISTORY_CHUNK
from jaxinfer.sampling.typical import Typical
from jaxinfer.scheduler.plan import ScheduledRow, StepPlan
from sharding.layout import ONE_DEVICE, Layout

_NO: Any = np.bool_(False)

LogitsOf = Callable[[np.ndarray], jax.Array]
"""Indices [P] to float32 logits [P, V]."""


@dataclass(frozen=True)
class Admission:
    """What the sampler has to know of a sequence that got a batch slot, as it was then."""

    slot: int
    key: tuple[int, int]
    request: Request
    output_token_ids: tuple[int, ...]


def admissions(plan: StepPlan) -> list[Admission]:
    """The sequences that a plan admits."""
    return [Admission(s.slot, s.key, s.request, tuple(s.output_token_ids)) for s in plan.admitted]


@dataclass(frozen=True)
class SampledStep:
    """Sampled rows on their way to the host; ``outputs`` is None if no row is sampled."""

    outputs: SamplerOutputs | None
    count: int
    with_logprobs: bool

    def fetch(self) -> tuple[np.ndarray, np.ndarray, LogprobRows | None]:
        """Waits for tokens, health, and log-probabilities if any row asked for them."""
        if self.outputs is None:
            return np.zeros(0, np.int32), np.zeros(0, bool), None
        tokens, healthy = np.asarray(self.outputs.token_P), np.asarray(self.outputs.healthy_P)
        rows = _to_host(self.outputs.logprobs) if self.with_logprobs else None
        return tokens[: self.count], healthy[: self.count], rows


@dataclass(frozen=True)
class PendingScores:
    """Scored prompt positions on their way to the host, in pieces of ``CompilePlan.scored_rows``."""

    first: int
    pieces: tuple[tuple[LogprobOutputs, int], ...]

    def fetch(self) -> ScoredChunk:
        parts = [(_to_host(outputs), count) for outputs, count in self.pieces]
        joined = {
            name: np.concatenate([vars(rows)[name][:count] for rows, count in parts])
            for name in vars(parts[0][0])
        }
        return ScoredChunk(self.first, LogprobRows(**joined))


class DeviceSampler:
    """Samples the rows of steps, in the order of dispatch.

    Args:
        eos_token_ids: end tokens of the model, which ``min_tokens`` bans.
        draw_op, typical: see ``sample``.
        layout: where the logits are.
    """

    def __init__(
        self,
        vocab_size: int,
        plan: CompilePlan,
        eos_token_ids: Seq[int],
        draw_op: Draw | None = None,
        layout: Layout = ONE_DEVICE,
        typical: Typical | None = None,
    ) -> None:
        self._plan = plan
        self._programs = sampler_programs(vocab_size, draw_op, layout, typical)
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._table = SamplingTable(plan.max_num_seqs, vocab_size, plan.max_drafts)
        self._state = self._programs.init(plan.max_num_seqs)

    @property
    def newest_W(self) -> jax.Array:
        """Newest token of each batch slot, on the device."""
        return self._state.newest_W

    def prepare(self, admissions: Seq[Admission]) -> None:
        """Gives the batch slots of newly admitted sequences to them."""
        for new in admissions:
            self._table.set(
                new.slot,
                new.request.params,
                new.key,
                len(new.request.prompt_token_ids),
                self._eos,
                bad_words=new.request.bad_words,
            )
            if new.request.params.penalised:
                self._restore(new.slot, new.request.prompt_token_ids, new.output_token_ids)

    def slots(self, arrays: StepArrays) -> np.ndarray:
        """Batch slots of a step's sampled rows. Taken when the step begins: until it is sampled, a sequence may end
        and lose its slot, which nobody else gets before.
        """
        return np.array([row.seq.slot for row in arrays.samples.rows])

    def sample(
        self, arrays: StepArrays, slots: np.ndarray, logits: LogitsOf, masks: Masks | None = None
    ) -> SampledStep:
        """Samples a token for each sampled position of a step.

        Args:
            slots: of the sampled rows.
            logits: called with the index in the batch of the token before each of them, padded.
            masks: what rows may get, in the place of the bans that their parameters name.
        """
        samples = arrays.samples
        rows = samples.rows
        if not rows:
            return SampledStep(None, 0, False)
        bucket = self._plan.rows(len(rows))
        index_P = np.zeros(bucket, np.int32)
        index_P[: len(rows)] = samples.tokens
        drafts = Drafts(samples.drafts, samples.before) if (samples.before >= 0).any() else None
        inputs = self._table.build(slots, samples.positions, bucket, masks, drafts)
        outputs, self._state = self._programs.sample(logits(index_P), inputs, self._state)
        return SampledStep(outputs, len(rows), bool(inputs.any_logprobs))

    def draw(
        self, arrays: StepArrays, logits: LogitsOf, newest_W: jax.Array, masks: Masks | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Tokens that other logits would give at the sampled positions of a step; nothing is recorded.

        Penalties count the tokens that were recorded, not those drawn here.

        Args:
            logits: see ``sample``.
            newest_W: newest token of each batch slot, by this account; donated.
            masks: see ``sample``.

        Returns:
            The tokens, int32 [P] with the rows first, and ``newest_W`` with them.
        """
        count = len(arrays.samples.rows)
        bucket = self._plan.rows(count)
        index_P = np.zeros(bucket, np.int32)
        index_P[:count] = arrays.samples.tokens
        inputs = self._table.build(self.slots(arrays), arrays.samples.positions, bucket, masks)
        inputs = replace(inputs, any_logprobs=_NO, any_named=_NO)
        return self._programs.draw(logits(index_P), inputs, self._state, newest_W)

    def warm_draw(
        self, bucket: int, logits_PV: jax.Array, newest_W: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Runs the program of ``draw`` for a bucket, on padding."""
        spare, none = np.full(1, self._plan.max_num_seqs), np.zeros(1, np.int32)
        inputs = self._table.build(spare, none, bucket)
        return self._programs.draw(logits_PV, inputs, self._state, newest_W)

    def score(self, row: ScheduledRow, logits: LogitsOf) -> PendingScores:
        """Log-probabilities of the prompt tokens that a row's positions predict.

        Args:
            logits: called with indices relative to the row's first token, padded.
        """
        request = row.seq.request
        first, stop = scored_range(row)
        size = self._plan.scored_rows
        pieces = []
        for start in range(first, stop, size):
            count = min(size, stop - start)
            index_P = np.zeros(size, np.int32)
            index_P[:count] = np.arange(start - first, start - first + count)
            target_P = np.zeros(size, np.int32)
            target_P[:count] = request.prompt_token_ids[start : start + count]
            named_PX = _named_ids(row, start, count, size)
            pieces.append((self._programs.score(logits(index_P), target_P, named_PX), count))
        return PendingScores(first, tuple(pieces))

    def compile_one_row(self) -> None:
        """Compiles what samples a single row; it needs no model."""
        bucket = self._plan.row_buckets[0]
        inputs = self._table.build(np.full(1, self._plan.max_num_seqs), np.zeros(1, np.int32), bucket)
        logits_PV = self._programs.zero_logits(bucket)
        _, self._state = self._programs.sample(logits_PV, inputs, self._state)

    def warm_ups(self, logits: LogitsOf) -> list[Callable[[], object]]:
        """One call per program that samples or scores, on padding."""
        plan = self._plan
        spare, none = np.full(1, plan.max_num_seqs), np.zeros(1, np.int32)

        def warm(bucket: int) -> None:
            inputs = self._table.build(spare, none, bucket)
            _, self._state = self._programs.sample(logits(np.zeros(bucket, np.int32)), inputs, self._state)

        def warm_score() -> None:
            size = plan.scored_rows
            named_PX = np.zeros((size, MAX_LOGPROB_TOKEN_IDS), np.int32)
            self._programs.score(logits(np.zeros(size, np.int32)), np.zeros(size, np.int32), named_PX)

        def warm_reset() -> None:
            self._reset_chunk(plan.max_num_seqs, (), (), True)

        return [*(partial(warm, bucket) for bucket in plan.row_buckets), warm_score, warm_reset]

    def _restore(self, slot: int, prompt: Seq[int], output: Seq[int]) -> None:
        """Makes the slot's state that of a sequence, whatever the slot held before."""
        for start in range(0, max(len(prompt), len(output)), HISTORY_CHUNK):
            stop = start + HISTORY_CHUNK
            self._reset_chunk(slot, prompt[start:stop], output[start:stop], start == 0)

    def _reset_chunk(self, slot: int, prompt: Seq[int], output: Seq[int], first: bool) -> None:
        chunks = []
        for ids in (prompt, output):
            padded = np.zeros(HISTORY_CHUNK, np.int32)
            padded[: len(ids)] = ids
            chunks += [padded, np.int32(len(ids))]
        self._state = self._programs.reset(self._state, np.int32(slot), *chunks, np.bool_(first))


def _named_ids(row: ScheduledRow, start: int, count: int, size: int) -> np.ndarray:
    """Token ids to report at prompt positions ``start`` to ``start + count``; 0 where none was named."""
    params = row.seq.request.params
    named_PX = np.zeros((size, MAX_LOGPROB_TOKEN_IDS), np.int32)
    for i in range(count):
        at = start + i - (params.prompt_logprob_start or 0)
        if params.prompt_logprob_token_ids and 0 <= at < len(params.prompt_logprob_token_ids):
            ids = [token for token in params.prompt_logprob_token_ids[at] if token >= 0]
            named_PX[i, : len(ids)] = ids
    return named_PX


def _to_host(outputs: LogprobOutputs) -> LogprobRows:
    fetched = jax.device_get(outputs)
    return LogprobRows(
        fetched.chosen_P, fetched.rank_P, fetched.top_ids_PX, fetched.top_values_PX, fetched.named_values_PX
    )
