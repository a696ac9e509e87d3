"""The step loop: schedule, build, dispatch, commit."""

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from jaxinfer.batch.builder import BatchBuilder
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.engine.sequence_output import SequenceOutput
from jaxinfer.engine.stop import StopConditions
from jaxinfer.observability.compilation import CompilationMonitor
from jaxinfer.observability.stats import EngineStats
from jaxinfer.outputs import RequestMetrics
from jaxinfer.request import FinishReason, Sequence, Status
from jaxinfer.runner.protocol import Runner, StepHandle, StepResult
from jaxinfer.scheduler.plan import ScheduledRow, StepPlan
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class _InFlight:
    plan: StepPlan
    handle: StepHandle


class EngineCore:
    """Runs requests to their end, one step at a time. Not thread-safe: one thread calls it.

    Args:
        depth: steps that may be in flight while the next one is planned (0: synchronous).
        tokenizer: None if no request is detokenized.
        compilations: asked after every step whether something was compiled.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        builder: BatchBuilder,
        runner: Runner,
        stop: StopConditions,
        tokenizer: Tokenizer | None,
        compilations: CompilationMonitor,
        depth: int,
    ) -> None:
        self.scheduler = scheduler
        self.stats = EngineStats()
        self._builder = builder
        self._runner = runner
        self._stop = stop
        self._tokenizer = tokenizer
        self._compilations = compilations
        self._depth = depth
        self._in_flight: deque[_InFlight] = deque()
        self._requests: dict[str, list[Sequence]] = {}
        self._outputs: dict[Sequence, SequenceOutput] = {}
        self._ready: list[OutputDelta] = []

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight) or bool(self._ready)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def add(self, sequences: list[Sequence]) -> None:
        """Queues the choices of one validated request.

        Raises:
            QueueFullError: an admission limit is reached; nothing was queued.
            RequestError: the request has more choices than may ever wait.
        """
        request_id = sequences[0].request.request_id
        assert request_id not in self._requests, f"request id {request_id!r} is used twice at the same time"
        self.scheduler.add(sequences)
        self._requests[request_id] = sequences
        for seq in sequences:
            self._outputs[seq] = SequenceOutput(seq, self._tokenizer)
        self.stats.admitted(sequences[0].num_prompt)

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is; unknown and finished ones are ignored."""
        for seq in self._requests.get(request_id, []):
            if seq.status is not Status.FINISHED:
                self._end(seq, FinishReason.ABORT)

    def step(self) -> list[OutputDelta]:
        """Dispatches the next step, if there is one, and commits the step before it."""
        plan = self.scheduler.schedule()
        if plan is not None:
            arrays = self._builder.build(plan)
            self._in_flight.append(_InFlight(plan, self._runner.dispatch(plan, arrays)))
            self._note_dispatch(plan, arrays.token_bucket)
        if self._in_flight and (plan is None or len(self._in_flight) > self._depth):
            oldest = self._in_flight.popleft()
            self._commit(oldest.plan, oldest.handle.result())
            self._compilations.check()
        deltas, self._ready = self._ready, []
        return deltas

    def _note_dispatch(self, plan: StepPlan, token_bucket: int) -> None:
        self.stats.dispatched(plan, token_bucket)
        now = time.monotonic()
        for seq in plan.admitted:
            if seq.first_scheduled_time is None:
                seq.first_scheduled_time = now

    def _commit(self, plan: StepPlan, result: StepResult) -> None:
        sampled = 0
        for index, row in enumerate(plan.rows):
            chunk = result.scores.get(index)
            sound = chunk is None or not bool(np.isnan(chunk.logprobs.chosen_P).any())
            if chunk is not None and row.seq in self._outputs:
                self._outputs[row.seq].add_prompt_logprobs(chunk)
            if row.samples:
                row.seq.num_in_flight -= 1
                sound = sound and bool(result.healthy[sampled])
            if row.seq.status is not Status.FINISHED:
                if not sound:
                    self._fail(row.seq)
                else:
                    self.scheduler.commit(row)
                    self._commit_output(row, result, sampled)
            sampled += row.samples

    def _commit_output(self, row: ScheduledRow, result: StepResult, sampled: int) -> None:
        seq = row.seq
        if not row.samples:
            if seq.max_tokens == 0 and row.start + row.num_tokens == seq.num_prompt:
                self._end(seq, FinishReason.LENGTH)
            return
        seq.output_token_ids.append(int(result.tokens[sampled]))
        if seq.first_token_time is None:
            seq.first_token_time = time.monotonic()
        if result.logprobs is not None:
            self._outputs[seq].add_logprobs(result.logprobs, sampled)
        self._check_stop(seq)

    def _check_stop(self, seq: Sequence) -> None:
        output, token = self._outputs[seq], seq.output_token_ids[-1]
        ended = self._stop.check(seq)
        if ended is not None and ended[0] is FinishReason.STOP:
            if seq.request.params.include_stop_str_in_output:
                output.push(token)
            self._end(seq, *ended)
            return
        stop_string = output.push(token)
        if stop_string is not None:
            self._end(seq, FinishReason.STOP, stop_string)
        elif ended is not None:
            self._end(seq, *ended)
        elif output.has_news:
            self._emit(seq)

    def _fail(self, seq: Sequence) -> None:
        """Ends one sequence whose logits are not finite; nothing it computed stays in the prefix cache."""
        self.scheduler.kv.forget(seq)
        self._end(
            seq,
            FinishReason.ERROR,
            error="no token can be sampled: the model's logits are not finite, or all tokens are banned",
        )

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        self.scheduler.finish(seq, reason, stop_reason)
        self._outputs[seq].finish()
        self._emit(seq, error)
        del self._outputs[seq]
        self.stats.finished(seq)
        request_id = seq.request.request_id
        if all(s.status is Status.FINISHED for s in self._requests[request_id]):
            del self._requests[request_id]

    def _emit(self, seq: Sequence, error: str | None = None) -> None:
        output = self._outputs[seq]
        token_ids, text, logprobs = output.take()
        finished = seq.finish_reason is not None
        self._ready.append(
            OutputDelta(
                request_id=seq.request.request_id,
                index=seq.index,
                token_ids=token_ids,
                text=text,
                logprobs=logprobs,
                prompt_logprobs=output.take_prompt_logprobs(),
                finish_reason=seq.finish_reason,
                stop_reason=seq.stop_reason,
                num_cached_tokens=max(seq.num_cached, 0),
                metrics=_metrics(seq) if finished else None,
                error=error,
            )
        )

    def check_integrity(self) -> None:
        """Asserts that nothing is lost or held twice; for tests, after any step."""
        self.scheduler.check_integrity()
        live = set(self.scheduler.live_sequences())
        assert live == set(self._outputs), "an output belongs to no live sequence, or a sequence has none"
        requests = {seq.request.request_id for seq in live}
        assert requests == set(self._requests), "the request table differs from the live sequences"


def _metrics(seq: Sequence) -> RequestMetrics:
    return RequestMetrics(
        arrival_time=seq.request.arrival_time,
        first_scheduled_time=seq.first_scheduled_time,
        first_token_time=seq.first_token_time,
        finished_time=time.monotonic(),
        num_preemptions=seq.preemptions,
    )
