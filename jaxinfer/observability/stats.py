"""Counters of an engine: one bookkeeping for every way in which requests run and end."""

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from jaxinfer.observability.snapshot import MAX_STEP_RECORDS, STEP_TOKENS, StepRecord
from jaxinfer.request import FinishReason, Sequence
from jaxinfer.scheduler.plan import StepPlan

AT_ONCE = 0.002
"""Seconds between the end of a step and the planning of the next one, up to which there was work all the time."""


class StepTiming(NamedTuple):
    """A dispatched step, until its record is complete.

    Attributes:
        started, dispatched: ``time.monotonic``.
    """

    started: float
    dispatched: float
    prefill_tokens: int
    decode_tokens: int
    padded_tokens: int
    sequences: int
    preempted: int
    drafts: int

    @classmethod
    def of(cls, plan: StepPlan, token_bucket: int, started: float, dispatched: float) -> Self:
        tokens = plan.num_tokens
        decodes = sum(
            [
                row.num_tokens
                for row in plan.rows
                if row.num_outputs > 0 and row.num_tokens == 1 + len(row.drafts.tokens)
            ]
        )
        padded = token_bucket - tokens
        drafts = sum([len(row.drafts) for row in plan.rows]) if plan.drafted else 0
        rows = len(plan.rows)
        return cls(started, dispatched, tokens - decodes, decodes, padded, rows, plan.preempted, drafts)


@dataclass
class EngineStats:
    """Totals since start; none of them ever falls.

    Attributes:
        steps: dispatched steps; ``steps_committed`` of them are done.
        computed_tokens: tokens computed, recomputation after preemption included.
        padded_tokens: padding computed with them.
        preemptions: sequences that lost their blocks.
        prompt_tokens: of admitted requests.
        prefix_query_tokens, prefix_hit_tokens: prompt tokens of first admissions that looked in the prefix cache, and
            those that it held. Siblings of the first choice share its prompt and do not count.
        generated_tokens: tokens sampled or forced, stop tokens included.
        drafts, drafted_tokens, accepted_tokens: verified drafts of sequences, and their tokens.
        accepted_by_depth: accepted tokens by their place in the draft.
        requests_admitted, requests_rejected: requests queued, and refused for a full queue.
        requests_finished: requests by the finish reason of the choice that ended last.
        finished_by_reason: sequences ended, by finish reason.
        host_seconds, device_seconds: of committed steps, as in ``StepRecord``.
        steps_by_tokens: dispatched steps, as in ``EngineSnapshot``.
        sparse_layers: layers that have experts; known after the first step that is done.
        expert_tokens_LE: tokens that each expert of these layers got, int64.
        expert_peak_tokens_L: of each of these layers, the tokens of the busiest expert of each step, added up.
        records: the newest steps.
    """

    steps: int = 0
    steps_committed: int = 0
    computed_tokens: int = 0
    padded_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    requests_admitted: int = 0
    requests_rejected: int = 0
    requests_finished: Counter[FinishReason] = field(default_factory=Counter)
    finished_by_reason: Counter[FinishReason] = field(default_factory=Counter)
    host_seconds: float = 0.0
    device_seconds: float = 0.0
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    sparse_layers: tuple[int, ...] = ()
    expert_tokens_LE: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    expert_peak_tokens_L: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=MAX_STEP_RECORDS))
    _device_free_at: float = 0.0
    _done_at: float = 0.0

    def admitted(self, num_prompt: int) -> None:
        self.requests_admitted += 1
        self.prompt_tokens += num_prompt

    def scheduled_first(self, seq: Sequence) -> None:
        if seq.index == 0 and not seq.request.params.skip_reading_prefix_cache:
            self.prefix_query_tokens += seq.num_prompt
            self.prefix_hit_tokens += max(seq.num_cached, 0)

    def dispatched(self, plan: StepPlan, token_bucket: int) -> None:
        self.steps += 1
        tokens = plan.num_tokens
        self.computed_tokens += tokens
        self.steps_by_tokens[bisect_left(STEP_TOKENS, tokens)] += 1
        self.padded_tokens += token_bucket - tokens
        self.preemptions += plan.preempted

    def verified(self, drafted: int, accepted: int) -> None:
        self.drafts += 1
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        self.accepted_by_depth += [0] * (drafted - len(self.accepted_by_depth))
        for depth in range(accepted):
            self.accepted_by_depth[depth] += 1

    def routed(self, layers: tuple[int, ...], rows_LE: np.ndarray) -> None:
        """Takes the rows that experts got in a step, as in ``ExpertLoad``."""
        if not self.sparse_layers:
            self.expert_tokens_LE = np.zeros(rows_LE.shape, np.int64)
            self.expert_peak_tokens_L = np.zeros(len(layers), np.int64)
            self.sparse_layers = layers
        self.expert_tokens_LE += rows_LE
        self.expert_peak_tokens_L += rows_LE.max(axis=1)

    def committed(self, timing: StepTiming, ready: float, done: float) -> None:
        """Completes a step whose results were there at ``ready`` and were worked off at ``done``.

        A device runs one step after the other: it starts a step when it is dispatched or when the one before it is
        done, whichever is later.
        """
        device = ready - max(timing.dispatched, self._device_free_at)
        follows = timing.started - self._done_at < AT_ONCE
        interval = ready - (self._device_free_at if follows else timing.started)
        host = timing.dispatched - timing.started + done - ready
        self._device_free_at, self._done_at = ready, done
        self.records.append(
            StepRecord(
                index=self.steps_committed,
                start=timing.started,
                host_seconds=host,
                device_seconds=device,
                prefill_tokens=timing.prefill_tokens,
                decode_tokens=timing.decode_tokens,
                padded_tokens=timing.padded_tokens,
                sequences=timing.sequences,
                preempted=timing.preempted,
                drafts=timing.drafts,
                interval=interval,
            )
        )
        self.steps_committed += 1
        self.host_seconds += host
        self.device_seconds += device
