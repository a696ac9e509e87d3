"""The output side of one sequence inside the core: text, log-probabilities, and what was given out already."""

import time
from collections.abc import Sequence as Seq

import numpy as np

from jaxinfer.engine.deltas import OutputDelta, TokenLogprobs
from jaxinfer.outputs import RequestMetrics
from jaxinfer.request import FinishReason, Sequence
from jaxinfer.runner.protocol import LogprobRows, ScoredChunk
from jaxinfer.tokenization.output import OutputText, TextRules
from jaxinfer.tokenization.tokenizer import Tokenizer


class SequenceOutput:
    """Collects what a sequence produced, and hands out what is final."""

    __slots__ = (
        "_logprobs",
        "_new_text",
        "_num_final",
        "_num_given",
        "_pooled_D",
        "_prompt",
        "_seq",
        "_text",
    )

    def __init__(self, seq: Sequence, tokenizer: Tokenizer | None) -> None:
        params = seq.request.params
        self._seq = seq
        self._text: OutputText | None = None
        if tokenizer is not None and params.detokenize:
            rules = TextRules(
                stop_strings=tuple(params.stop),
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
            self._text = OutputText(tokenizer, seq.request.prompt_token_ids, rules)
        self._logprobs: list[TokenLogprobs] = []
        self._num_given = 0
        self._num_final = 0
        self._new_text = ""
        self._pooled_D: np.ndarray | None = None
        self._prompt: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None and seq.index == 0:
            self._prompt = [None] * seq.num_prompt

    def add_logprobs(self, rows: LogprobRows, index: int) -> None:
        """Notes the log-probabilities of the newest token."""
        params = self._seq.request.params
        if params.logprobs is not None or params.logprob_token_ids:
            token = self._seq.output_token_ids[-1]
            self._logprobs.append(
                token_logprobs(rows, index, token, params.logprobs or 0, params.logprob_token_ids or ())
            )

    def add_prompt_logprobs(self, chunk: ScoredChunk) -> None:
        """Notes the log-probabilities of a chunk of the prompt; a recomputed chunk replaces itself."""
        if self._prompt is None:
            return
        params = self._seq.request.params
        start = params.prompt_logprob_start or 0
        named = params.prompt_logprob_token_ids
        for i in range(len(chunk.logprobs.chosen_P)):
            position = chunk.first + i
            if position < start:
                continue
            token = self._seq.request.prompt_token_ids[position]
            ids = (
                tuple(t for t in named[position - start] if t >= 0)
                if named and position - start < len(named)
                else ()
            )
            self._prompt[position] = token_logprobs(
                chunk.logprobs, i, token, params.prompt_logprobs or 0, ids
            )

    def add_pooled(self, start: int, sum_D: np.ndarray) -> None:
        """Adds the hidden states of a chunk of the prompt; a preempted sequence starts again."""
        if start == 0 or self._pooled_D is None:
            self._pooled_D = np.zeros(len(sum_D), np.float64)
        self._pooled_D = self._pooled_D + sum_D

    def _embedding(self) -> tuple[float, ...] | None:
        """The pooled hidden state, in float32 precision, once the whole prompt is computed; None without pooling, and
        where it failed."""
        if self._pooled_D is None or self._seq.finish_reason is not FinishReason.STOP:
            return None
        count = self._seq.num_prompt if self._seq.request.pooling == "mean" else 1
        return tuple((self._pooled_D / count).astype(np.float32).tolist())

    def push(self, token_id: int) -> str | None:
        """Adds a token to the output. Returns the stop string that it completed, if any."""
        if self._text is None:
            self._num_final += 1
            return None
        delta = self._text.push((token_id,))
        self._new_text += delta.text
        self._num_final = delta.num_tokens
        return delta.stop

    def finish(self) -> None:
        """Ends the output: nothing is held back any more, and nothing behind a stop string is kept."""
        if self._text is not None:
            delta = self._text.finish()
            self._new_text += delta.text
            self._num_final = delta.num_tokens

    def take(self, error: str | None = None) -> OutputDelta:
        """What became final since the last call.

        Args:
            error: why the sequence failed, if it did.
        """
        seq, reason = self._seq, self._seq.finish_reason
        start, stop = self._num_given, max(self._num_final, self._num_given)
        self._num_given = stop
        text, self._new_text = self._new_text, ""
        prompt, self._prompt = self._prompt, None
        return OutputDelta(
            seq.request.request_id,
            seq.index,
            tuple(seq.output_token_ids[start:stop]),
            text,
            tuple(self._logprobs[start:stop]) if self._logprobs else (),
            None if prompt is None else tuple(prompt),
            reason,
            seq.stop_reason,
            max(seq.num_cached, 0),
            None if reason is None else _metrics(seq),
            error,
            None if reason is None else self._embedding(),
        )

    def take_news(self) -> OutputDelta | None:
        """As ``take``; None if nothing is new."""
        return self.take() if self._num_final > self._num_given or self._new_text else None


def _metrics(seq: Sequence) -> RequestMetrics:
    return RequestMetrics(
        arrival_time=seq.request.arrival_time,
        first_scheduled_time=seq.first_scheduled_time,
        first_token_time=seq.first_token_time,
        finished_time=time.monotonic(),
        num_preemptions=seq.preemptions,
        num_draft_tokens=seq.num_drafted,
        num_accepted_tokens=seq.num_accepted,
    )


def token_logprobs(rows: LogprobRows, index: int, token: int, num_top: int, named: Seq[int]) -> TokenLogprobs:
    """Picks from the device's result what a request asked for."""
    top = tuple(zip(rows.top_ids_PX[index, :num_top].tolist(), rows.top_values_PX[index, :num_top].tolist()))
    values = tuple(zip(named, rows.named_values_PX[index, : len(named)].tolist()))
    return TokenLogprobs(token, float(rows.chosen_P[index]), int(rows.rank_P[index]), top, values)
