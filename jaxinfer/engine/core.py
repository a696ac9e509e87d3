"""The step loop: schedule, build, dispatch, commit."""

import time
from collections import deque
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from jaxinfer.batch.builder import BatchBuilder, StepArrays
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.engine.remote_kv import RemoteKV
from jaxinfer.engine.sequence_output import SequenceOutput
from jaxinfer.engine.stop import StopConditions
from jaxinfer.kv_cache.manager import SlotMove
from jaxinfer.observability.compilation import CompilationMonitor
from jaxinfer.observability.stats import EngineStats, StepTiming
from jaxinfer.request import FinishReason, QueueFullError, Sequence, Status
from jaxinfer.runner.protocol import LogprobRows, Runner, StepHandle, StepResult
from jaxinfer.scheduler.plan import ScheduledRow, StepPlan, accepted_moves
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.speculative.speculation import Speculation
from jaxinfer.speculative.verify import masks_along
from jaxinfer.structured.constraint import Constraint
from jaxinfer.tokenization.tokenizer import Tokenizer

NOTHING_ALLOWED = (
    "all tokens are banned: the form of the answer, allowed_token_ids, bad_words and min_tokens leave none"
)


Usable = dict[Sequence, frozenset[int]]


@dataclass(frozen=True)
class _InFlight:
    """A dispatched step.

    Attributes:
        usable: samples of a constrained row, by their number in the row, that were drawn under their masks.
    """

    plan: StepPlan
    handle: StepHandle
    timing: StepTiming
    usable: Usable


class EngineCore:
    """Runs requests to their end, one step at a time. Not thread-safe: one thread calls it.

    Args:
        depth: steps that may be in flight while the next one is planned (0: synchronous).
        stages: of the runner's pipeline. If there are several, as many steps and ``depth`` more are in flight, and none
            has a sequence that another one has: what a step samples is known when the sequence's next one is planned.
        tokenizer: None if no request is detokenized.
        compilations: asked after every step whether something was compiled.
        speculation: gives drafts to running sequences; None: one token a step.
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
        speculation: Speculation | None = None,
        stages: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.stats = EngineStats()
        self._builder = builder
        self._runner = runner
        self._stop = stop
        self._tokenizer = tokenizer
        self._compilations = compilations
        self._depth = depth + stages - 1
        self._batches = depth + stages if stages > 1 else 1
        self._speculation = speculation
        self._in_flight: deque[_InFlight] = deque()
        self._requests: dict[str, list[Sequence]] = {}
        self._outputs: dict[Sequence, SequenceOutput] = {}
        self._ready: list[OutputDelta] = []
        self._stuck = False
        self.remote: RemoteKV | None = None
        """Set if other engines compute prompts for this one, or the other way round."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do something. Sequences whose blocks are on their way from another engine, and those
        that wait for room that these hold, have to wait for news."""
        if self.remote is not None and self.remote.has_news:
            return True
        waits = self.scheduler.has_work and not self._stuck
        return waits or bool(self._in_flight) or bool(self._ready)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def add(self, sequences: list[Sequence]) -> None:
        """Queues the choices of validated requests: all of them, or none.

        Raises:
            QueueFullError: an admission limit is reached.
            RequestError: there are more choices than may ever wait.
        """
        requests: dict[str, list[Sequence]] = {}
        for seq in sequences:
            requests.setdefault(seq.request.request_id, []).append(seq)
        for request_id in requests:
            assert request_id not in self._requests, (
                f"request id {request_id!r} is used twice at the same time"
            )
        try:
            self.scheduler.add(sequences)
        except QueueFullError:
            self.stats.requests_rejected += len(requests)
            raise
        self._requests |= requests
        self._stuck = False
        for seq in sequences:
            self._outputs[seq] = SequenceOutput(seq, self._tokenizer)
            seq.may_fetch = self.remote is not None and self.remote.may_fetch(seq)
        for choices in requests.values():
            self.stats.admitted(choices[0].num_prompt)

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is; unknown and finished ones are ignored."""
        self._stuck = False
        for seq in self._requests.get(request_id, []):
            if seq.status is not Status.FINISHED:
                self._end(seq, FinishReason.ABORT)

    def step(self) -> list[OutputDelta]:
        """Dispatches the next step, if there is one, and commits the step before it."""
        drafting = self._speculation is not None and self._wait_for_drafts(self._speculation)
        started = time.monotonic()
        if drafting and self._speculation is not None:
            self._speculation.draft(self._idle())
        plan = self.scheduler.schedule(self._busy(), self._batches)
        if self.remote is not None:
            plan = self.remote.scheduled(plan)
        self._stuck = plan is None and not self._in_flight and self.scheduler.waits_for_blocks
        if plan is not None:
            arrays = self._builder.build(plan)
            self._note_dispatch(plan, arrays.token_bucket)
            usable: Usable = {}
            if plan.constrained:
                handle, dispatched, usable = self._dispatch_in_phases(plan, arrays)
            else:
                handle, dispatched = self._runner.dispatch(plan, arrays), time.monotonic()
            timing = StepTiming.of(plan, arrays.token_bucket, started, dispatched)
            self._in_flight.append(_InFlight(plan, handle, timing, usable))
        if self._in_flight and (plan is None or len(self._in_flight) > self._depth):
            self._commit_oldest()
        deltas, self._ready = self._ready, []
        return deltas

    def _busy(self) -> set[Sequence]:
        """Sequences that no other step may have: in a pipeline, those of all steps in flight."""
        return {row.seq for step in self._in_flight for row in step.plan.rows} if self._batches > 1 else set()

    def _idle(self) -> list[Sequence]:
        """Running sequences that the next step may have."""
        busy = self._busy()
        return [seq for seq in self.scheduler.running if seq not in busy]

    def _wait_for_drafts(self, speculation: Speculation) -> bool:
        """Whether running sequences are to get drafts; then all steps before are committed.

        Drafts follow the newest token, so it has to be known; and how far a verified sequence is computed is known at
        its commit only. Such steps are not overlapped, but for those of a pipeline, which have nothing in common.
        """
        if self._batches > 1:
            return speculation.wants(self._idle())
        if any(step.plan.drafted for step in self._in_flight):
            self._commit_all()
        wanted = speculation.wants(self._idle())
        if wanted:
            self._commit_all()
        return wanted

    def _dispatch_in_phases(self, plan: StepPlan, arrays: StepArrays) -> tuple[StepHandle, float, Usable]:
        """For steps with rows whose next token depends on tokens that are in flight: while the device computes the
        layers, the steps before are committed and the masks are filled; then the sampler is dispatched.

        Returns:
            The handle, the time at which the device had its work, and the usable samples of rows with drafts.
        """
        begun = self._runner.begin(plan, arrays)
        dispatched = time.monotonic()
        while self._in_flight and self._batches == 1:
            self._commit_oldest()
        masks: dict[int, np.ndarray] = {}
        usable: Usable = {}
        index = 0
        for row in plan.rows:
            if row.samples and row.seq.constraint is not None and row.seq.status is Status.RUNNING:
                mask_X = self._next_mask(row.seq, row.seq.constraint)
                if mask_X is not None:
                    behind = masks_along(row.drafts, row.seq.constraint)
                    of_row = {0: mask_X} | {1 + node: mask_X for node, mask_X in behind.items()}
                    masks |= {index + number: mask_X for number, mask_X in of_row.items()}
                    usable[row.seq] = frozenset(of_row)
            index += row.num_samples
        return begun.sample(masks), dispatched, usable

    def _next_mask(self, seq: Sequence, constraint: Constraint) -> np.ndarray | None:
        """The tokens allowed next; None if the row's sample is not wanted: the tokens are known, or there are none."""
        forced = constraint.forced()
        if forced:
            self._jump(seq, forced)
            return None
        mask_X = constraint.next_mask()
        if mask_X.any():
            return mask_X
        if constraint.may_end:
            self._end(seq, FinishReason.STOP)
        else:
            self._end(seq, FinishReason.ERROR, error=NOTHING_ALLOWED)
        return None

    def _jump(self, seq: Sequence, forced: list[int]) -> None:
        """Jump-ahead: appends forced tokens at once; the next step computes them like a chunk of a prompt.

        The step that is just dispatched samples the first of them too. Its result is dropped: at commit it is not
        the next token of the sequence any more.
        """
        seq.num_in_flight -= 1
        for token in forced:
            self._append(seq, token)
            if seq.status is Status.FINISHED:
                return

    def _commit_all(self) -> None:
        while self._in_flight:
            self._commit_oldest()

    def _commit_oldest(self) -> None:
        oldest = self._in_flight.popleft()
        result = oldest.handle.result()
        ready = time.monotonic()
        self._commit(oldest.plan, result, oldest.usable)
        self.stats.committed(oldest.timing, ready, time.monotonic())
        if self._speculation is not None:
            self._speculation.observe(self.stats.records[-1])
        self._compilations.check()

    def _note_dispatch(self, plan: StepPlan, token_bucket: int) -> None:
        self.stats.dispatched(plan, token_bucket)
        now = time.monotonic()
        for seq in plan.admitted:
            if seq.first_scheduled_time is None:
                seq.first_scheduled_time = now
                if self.scheduler.kv.prefix_caching:
                    self.stats.scheduled_first(seq)

    def _commit(self, plan: StepPlan, result: StepResult, usable: Usable) -> None:
        sampled = 0
        moves: list[SlotMove] = []
        tokens, healthy = result.tokens.tolist(), result.healthy.tolist()
        for index, row in enumerate(plan.rows):
            chunk = result.scores.get(index)
            sound = chunk is None or not bool(np.isnan(chunk.logprobs.chosen_P).any())
            if chunk is not None and row.seq in self._outputs:
                self._outputs[row.seq].add_prompt_logprobs(chunk)
            pooled = result.pooled.get(index)
            if pooled is not None and row.seq in self._outputs:
                self._outputs[row.seq].add_pooled(row.start, pooled)
                sound = sound and bool(np.isfinite(pooled).all())
            if row.samples:
                row.seq.num_in_flight -= _is_next(row)
                sound = sound and healthy[sampled]
            if row.seq.status is not Status.FINISHED:
                if not sound:
                    self._fail(row.seq)
                elif row.drafts:
                    path = self._right_drafts(row, tokens[sampled : sampled + row.num_samples], usable)
                    moves += accepted_moves(row, path, self.scheduler.kv.block_size)
                    numbers = [0, *(1 + node for node in path)]
                    samples = [(sampled + number, healthy[sampled + number]) for number in numbers]
                    self._commit_drafts(row, samples, tokens, result.logprobs)
                else:
                    self.scheduler.commit(row)
                    token = tokens[sampled] if row.samples else None
                    self._commit_output(row, token, result.logprobs, sampled)
            sampled += row.num_samples
        if moves:
            self._runner.move(moves)

    def _commit_output(
        self, row: ScheduledRow, token: int | None, logprobs: LogprobRows | None, sampled: int
    ) -> None:
        seq = row.seq
        if token is None:
            if seq.max_tokens == 0 and row.start + row.num_tokens == seq.num_prompt:
                pooled = seq.request.pooling is not None
                self._end(seq, FinishReason.STOP if pooled else FinishReason.LENGTH)
            return
        if _is_next(row):
            self._append(seq, token, logprobs, sampled)

    def _right_drafts(self, row: ScheduledRow, tokens: list[int], usable: Usable) -> list[int]:
        """The drafts of a row that equal the samples before them, as far as these count.

        Args:
            tokens: the row's samples.
        """
        path = row.drafts.matching(tokens) if _is_next(row) else []
        allowed = usable.get(row.seq)
        if allowed is not None:
            path = list(takewhile(lambda node: 1 + node in allowed, path))
        if _is_next(row):
            self._note_verified(row.seq, len(row.drafts), len(path))
        return path

    def _commit_drafts(
        self,
        row: ScheduledRow,
        samples: list[tuple[int, bool]],
        tokens: list[int],
        logprobs: LogprobRows | None,
    ) -> None:
        """Takes the sample behind the newest token, and those behind the drafts that were right.

        K and V of these drafts are committed one by one, each when its token is known.

        Args:
            samples: index in the step, and health, of the samples that count.
            tokens: of all samples of the step.
        """
        seq = row.seq
        self.scheduler.commit(row)
        if not _is_next(row):
            return
        for accepted, (index, sound) in enumerate(samples):
            if accepted > 0:
                self.scheduler.commit(row, accepted)
            if not sound:
                self._fail(seq)
            else:
                self._append(seq, tokens[index], logprobs, index)
            if seq.status is Status.FINISHED:
                return

    def _note_verified(self, seq: Sequence, drafted: int, accepted: int) -> None:
        assert self._speculation is not None, "only speculation makes drafts"
        self._speculation.verified(seq, drafted, accepted)
        self.stats.verified(drafted, accepted)
        seq.num_drafted += drafted
        seq.num_accepted += accepted

    def _append(
        self, seq: Sequence, token: int, logprobs: LogprobRows | None = None, sampled: int = 0
    ) -> None:
        """Takes the next token of a sequence, whatever it is; may end the sequence."""
        seq.output_token_ids.append(token)
        self.stats.generated_tokens += 1
        if seq.first_token_time is None:
            seq.first_token_time = time.monotonic()
        if logprobs is not None:
            self._outputs[seq].add_logprobs(logprobs, sampled)
        if seq.constraint is not None and not seq.constraint.accept(token):
            self._end(seq, FinishReason.ERROR, error=f"token {token} does not fit the form of the answer")
        else:
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
        elif seq.constraint is not None and seq.constraint.complete:
            self._end(seq, FinishReason.STOP)
        elif ended is not None:
            self._end(seq, *ended)
        elif output.has_news:
            self._ready.append(output.take())

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
        if self._speculation is not None:
            self._speculation.forget(seq)
        output = self._outputs.pop(seq)
        output.finish()
        if self.remote is None or not self.remote.ended(seq, reason, error):
            self._ready.append(output.take(error))
        self.stats.finished_by_reason[reason] += 1
        request_id = seq.request.request_id
        if all(s.status is Status.FINISHED for s in self._requests[request_id]):
            del self._requests[request_id]
            self.stats.requests_finished[reason] += 1

    def check_integrity(self) -> None:
        """Asserts that nothing is lost or held twice; for tests, after any step."""
        self.scheduler.check_integrity()
        live = set(self.scheduler.live_sequences())
        assert live == set(self._outputs), "an output belongs to no live sequence, or a sequence has none"
        requests = {seq.request.request_id for seq in live}
        assert requests == set(self._requests), "the request table differs from the live sequences"
        if self.remote is not None:
            self.remote.check_integrity()


def _is_next(row: ScheduledRow) -> bool:
    """Whether a sampled token is the next one of its sequence; False if other tokens were appended meanwhile."""
    return row.samples and row.num_outputs == len(row.seq.output_token_ids)
