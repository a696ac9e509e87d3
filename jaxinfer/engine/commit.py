"""What follows from the results of a step: tokens, stop checks, news of the sequences, and their ends."""

import time
from itertools import takewhile

import numpy as np

from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.engine.remote_kv import RemoteKV
from jaxinfer.engine.sequence_output import SequenceOutput
from jaxinfer.engine.stop import StopConditions
from jaxinfer.kv_cache.manager import SlotMove
from jaxinfer.observability.stats import EngineStats
from jaxinfer.request import FinishReason, Sequence, Status
from jaxinfer.runner.protocol import LogprobRows, StepResult
from jaxinfer.scheduler.plan import ScheduledRow, StepPlan, accepted_moves
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.speculative.speculation import Speculation
from jaxinfer.tokenization.tokenizer import Tokenizer

_FINISHED = Status.FINISHED
"""For every sequence in every step: Python 3.11 takes 0.2 us to read a member off its enum."""

Usable = dict[Sequence, frozenset[int]]
"""Samples of a constrained row, by their number in the row, that were drawn under their masks."""


class Committer:
    """Moves the sequences of live requests on, token by token, to their ends.

    What is done for every token of every step is kept to few calls: it is host time that a device may wait for.

    Args:
        tokenizer: None if no request is detokenized.
        speculation: is told which drafts were right.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        stop: StopConditions,
        tokenizer: Tokenizer | None,
        stats: EngineStats,
        speculation: Speculation | None,
    ) -> None:
        self._scheduler = scheduler
        self._stop = stop
        self._tokenizer = tokenizer
        self._stats = stats
        self.speculation = speculation
        self._requests: dict[str, list[Sequence]] = {}
        self._outputs: dict[Sequence, SequenceOutput] = {}
        self._ready: list[OutputDelta] = []
        self.remote: RemoteKV | None = None

    @property
    def has_news(self) -> bool:
        return bool(self._ready)

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._requests)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def take_news(self) -> list[OutputDelta]:
        """What became final since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def choices(self, request_id: str) -> list[Sequence]:
        """The sequences of a live request, those that have ended included; none for any other id."""
        return self._requests.get(request_id, [])

    def add(self, requests: dict[str, list[Sequence]]) -> None:
        """Takes the choices of requests that are queued by now."""
        self._requests |= requests
        for choices in requests.values():
            for seq in choices:
                self._outputs[seq] = SequenceOutput(seq, self._tokenizer)
            self._stats.admitted(choices[0].num_prompt)

    def commit(self, plan: StepPlan, result: StepResult, usable: Usable) -> list[SlotMove]:
        """Takes the results of a step.

        Returns:
            Moves of K and V that must be made before the next step.
        """
        sampled = 0
        moves: list[SlotMove] = []
        tokens, healthy = result.tokens.tolist(), result.healthy.tolist()
        of_prompts = bool(result.scores or result.pooled)
        for index, row in enumerate(plan.rows):
            seq = row.seq
            sound = not of_prompts or self._take_prompt_results(index, row, result)
            next_token = is_next(row)
            if row.samples:
                seq.num_in_flight -= next_token
                sound = sound and healthy[sampled]
            if seq.status is not _FINISHED:
                if not sound:
                    self._fail(seq)
                elif row.drafts.tokens:
                    path = self._right_drafts(row, tokens[sampled : sampled + row.num_samples], usable)
                    moves += accepted_moves(row, path, self._scheduler.kv.block_size)
                    numbers = [0, *(1 + node for node in path)]
                    samples = [(sampled + number, healthy[sampled + number]) for number in numbers]
                    self._commit_drafts(row, samples, tokens, result.logprobs)
                else:
                    self._scheduler.commit(row)
                    if next_token:
                        self.append(seq, tokens[sampled], result.logprobs, sampled)
                    elif not row.samples:
                        self._end_if_only_scored(row)
            if row.samples:
                sampled += 1 + len(row.drafts.tokens)
        return moves

    def _take_prompt_results(self, index: int, row: ScheduledRow, result: StepResult) -> bool:
        """Takes log-probabilities and pooled states of a row's part of the prompt; False if not all are finite."""
        output = self._outputs.get(row.seq)
        chunk = result.scores.get(index)
        sound = chunk is None or not bool(np.isnan(chunk.logprobs.chosen_P).any())
        if chunk is not None and output is not None:
            output.add_prompt_logprobs(chunk)
        pooled = result.pooled.get(index)
        if pooled is not None and output is not None:
            output.add_pooled(row.start, pooled)
            sound = sound and bool(np.isfinite(pooled).all())
        return sound

    def _end_if_only_scored(self, row: ScheduledRow) -> None:
        """Ends a sequence that generates nothing once its prompt is computed."""
        seq = row.seq
        if seq.max_tokens == 0 and row.start + row.num_tokens == seq.num_prompt:
            pooled = seq.request.pooling is not None
            self.end(seq, FinishReason.STOP if pooled else FinishReason.LENGTH)

    # ---- drafts

    def _right_drafts(self, row: ScheduledRow, tokens: list[int], usable: Usable) -> list[int]:
        """The drafts of a row that equal the samples before them, as far as these count.

        Args:
            tokens: the row's samples.
        """
        path = row.drafts.matching(tokens) if is_next(row) else []
        allowed = usable.get(row.seq)
        if allowed is not None:
            path = list(takewhile(lambda node: 1 + node in allowed, path))
        if is_next(row):
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
        self._scheduler.commit(row)
        if not is_next(row):
            return
        for accepted, (index, sound) in enumerate(samples):
            if accepted > 0:
                self._scheduler.commit(row, accepted)
            if not sound:
                self._fail(seq)
            else:
                self.append(seq, tokens[index], logprobs, index)
            if seq.status is Status.FINISHED:
                return

    def _note_verified(self, seq: Sequence, drafted: int, accepted: int) -> None:
        assert self.speculation is not None, "only speculation makes drafts"
        self.speculation.verified(seq, drafted, accepted)
        self._stats.verified(drafted, accepted)
        seq.num_drafted += drafted
        seq.num_accepted += accepted

    # ---- one token, and the end

    def append(
        self, seq: Sequence, token: int, logprobs: LogprobRows | None = None, sampled: int = 0
    ) -> None:
        """Takes the next token of a sequence, whatever it is; may end the sequence.

        Args:
            sampled: the token's index in ``logprobs``.
        """
        seq.output_token_ids.append(token)
        self._stats.generated_tokens += 1
        if seq.first_token_time is None:
            seq.first_token_time = time.monotonic()
        output, constraint = self._outputs[seq], seq.constraint
        if logprobs is not None:
            output.add_logprobs(logprobs, sampled)
        if constraint is not None and not constraint.accept(token):
            self.end(seq, FinishReason.ERROR, error=f"token {token} does not fit the form of the answer")
            return
        ended = self._stop.check(seq)
        if ended is not None and ended[0] is FinishReason.STOP:
            if seq.request.params.include_stop_str_in_output:
                output.push(token)
            self.end(seq, *ended)
            return
        stop_string = output.push(token)
        if stop_string is not None:
            self.end(seq, FinishReason.STOP, stop_string)
        elif constraint is not None and constraint.complete:
            self.end(seq, FinishReason.STOP)
        elif ended is not None:
            self.end(seq, *ended)
        else:
            delta = output.take_news()
            if delta is not None:
                self._ready.append(delta)

    def _fail(self, seq: Sequence) -> None:
        """Ends one sequence whose logits are not finite; nothing it computed stays in the prefix cache."""
        self._scheduler.kv.forget(seq)
        self.end(
            seq,
            FinishReason.ERROR,
            error="no token can be sampled: the model's logits are not finite, or all tokens are banned",
        )

    def end(
        self,
        seq: Sequence,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        """Ends a live sequence in whatever state it is."""
        self._scheduler.finish(seq, reason, stop_reason)
        if self.speculation is not None:
            self.speculation.forget(seq)
        output = self._outputs.pop(seq)
        output.finish()
        if self.remote is None or not self.remote.ended(seq, reason, error):
            self._ready.append(output.take(error))
        self._stats.finished_by_reason[reason] += 1
        request_id = seq.request.request_id
        if all(s.status is Status.FINISHED for s in self._requests[request_id]):
            del self._requests[request_id]
            self._stats.requests_finished[reason] += 1

    def check_integrity(self, live: set[Sequence]) -> None:
        """Asserts that the live sequences, and no others, have a request and an output."""
        assert live == set(self._outputs), "an output belongs to no live sequence, or a sequence has none"
        requests = {seq.request.request_id for seq in live}
        assert requests == set(self._requests), "the request table differs from the live sequences"


def is_next(row: ScheduledRow) -> bool:
    """Whether a sampled token is the next one of its sequence; False if other tokens were appended meanwhile."""
    return row.samples and row.num_outputs == len(row.seq.output_token_ids)
