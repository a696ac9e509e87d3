"""The step loop: schedule, build, dispatch, commit."""

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from jaxinfer.batch.builder import BatchBuilder, StepArrays
from jaxinfer.engine.commit import Committer, Usable
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.engine.remote_kv import RemoteKV
from jaxinfer.engine.stop import StopConditions
from jaxinfer.kv_transfer.connector import drained
from jaxinfer.observability.compilation import CompilationMonitor
from jaxinfer.observability.stats import EngineStats, StepTiming
from jaxinfer.request import FinishReason, QueueFullError, Sequence, Status
from jaxinfer.runner.protocol import Runner, StepHandle
from jaxinfer.scheduler.plan import StepPlan
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.speculative.speculation import Speculation
from jaxinfer.speculative.verify import masks_along
from jaxinfer.structured.constraint import Constraint
from jaxinfer.tokenization.tokenizer import Tokenizer

NOTHING_ALLOWED = (
    "all tokens are banned: the form of the answer, allowed_token_ids, bad_words and min_tokens leave none"
)


@dataclass(frozen=True)
class _InFlight:
    """A dispatched step."""

    plan: StepPlan
    handle: StepHandle
    timing: StepTiming
    usable: Usable


class EngineCore:
    """Runs requests to their end, one step at a time. Not thread-safe: one thread calls it, but for ``drain``.

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
        self._compilations = compilations
        self._depth = depth + stages - 1
        self._batches = depth + stages if stages > 1 else 1
        self._committer = Committer(scheduler, stop, tokenizer, self.stats, speculation)
        self._in_flight: deque[_InFlight] = deque()
        self._stuck = False

    @property
    def remote(self) -> RemoteKV | None:
        """Set if other engines compute prompts for this one, or the other way round."""
        return self._committer.remote

    @remote.setter
    def remote(self, remote: RemoteKV) -> None:
        self._committer.remote = remote

    @property
    def speculation(self) -> Speculation | None:
        return self._committer.speculation

    @speculation.setter
    def speculation(self, speculation: Speculation | None) -> None:
        self._committer.speculation = speculation

    @property
    def has_work(self) -> bool:
        """Whether a step would do something. Sequences whose blocks are on their way from another engine, and those
        that wait for room that these hold, have to wait for news."""
        if self.remote is not None and self.remote.has_news:
            return True
        waits = self.scheduler.has_work and not self._stuck
        return waits or bool(self._in_flight) or self._committer.has_news

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Of live requests."""
        return self._committer.request_ids

    @property
    def num_requests(self) -> int:
        return self._committer.num_requests

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
            assert not self._committer.choices(request_id), (
                f"request id {request_id!r} is used twice at the same time"
            )
        try:
            self.scheduler.add(sequences)
        except QueueFullError:
            self.stats.requests_rejected += len(requests)
            raise
        self._committer.add(requests)
        self._stuck = False
        for seq in sequences:
            seq.may_fetch = self.remote is not None and self.remote.may_fetch(seq)

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is; unknown and finished ones are ignored."""
        self._stuck = False
        for seq in self._committer.choices(request_id):
            if seq.status is not Status.FINISHED:
                self._committer.end(seq, FinishReason.ABORT)

    def drain(self) -> Future[None]:
        """Refuses prompts of other engines from now on; done when those that were taken are over. On any thread."""
        return drained() if self.remote is None else self.remote.drain()

    def step(self) -> list[OutputDelta]:
        """Dispatches the next step, if there is one, and commits the step before it."""
        if self.remote is not None:
            self.remote.receive()
        speculation = self.speculation
        drafting = speculation is not None and self._wait_for_drafts(speculation)
        started = time.monotonic()
        if drafting and speculation is not None:
            speculation.draft(self._idle())
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
        return self._committer.take_news()

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
            self._committer.end(seq, FinishReason.STOP)
        else:
            self._committer.end(seq, FinishReason.ERROR, error=NOTHING_ALLOWED)
        return None

    def _jump(self, seq: Sequence, forced: list[int]) -> None:
        """Jump-ahead: appends forced tokens at once; the next step computes them like a chunk of a prompt.

        The step that is just dispatched samples the first of them too. Its result is dropped: at commit it is not
        the next token of the sequence any more.
        """
        seq.num_in_flight -= 1
        for token in forced:
            self._committer.append(seq, token)
            if seq.status is Status.FINISHED:
                return

    def _commit_all(self) -> None:
        while self._in_flight:
            self._commit_oldest()

    def _commit_oldest(self) -> None:
        oldest = self._in_flight.popleft()
        result = oldest.handle.result()
        ready = time.monotonic()
        moves = self._committer.commit(oldest.plan, result, oldest.usable)
        if result.experts is not None:
            self.stats.routed(result.experts.layers, result.experts.rows_LE)
        if moves:
            self._runner.move(moves)
        self.stats.committed(oldest.timing, ready, time.monotonic())
        if self.speculation is not None:
            self.speculation.observe(self.stats.records[-1])
        self._compilations.check()

    def _note_dispatch(self, plan: StepPlan, token_bucket: int) -> None:
        self.stats.dispatched(plan, token_bucket)
        now = time.monotonic()
        for seq in plan.admitted:
            if seq.first_scheduled_time is None:
                seq.first_scheduled_time = now
                if self.scheduler.kv.prefix_caching:
                    self.stats.scheduled_first(seq)

    def check_integrity(self) -> None:
        """Asserts that nothing is lost or held twice; for tests, after any step."""
        self.scheduler.check_integrity()
        self._committer.check_integrity(set(self.scheduler.live_sequences()))
        if self.remote is not None:
            self.remote.check_integrity()
