"""From the core's deltas to the outputs that users see."""

from collections.abc import Sequence as Seq

from jaxinfer.engine.deltas import OutputDelta, TokenLogprobs
from jaxinfer.outputs import (
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    Logprobs,
    PositionLogprobs,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
)
from jaxinfer.request import Request
from jaxinfer.sampling_params import OutputKind, SamplingParams
from jaxinfer.tokenization.tokenizer import Tokenizer, token_text


class OutputAssembler:
    """Builds the ``RequestOutput`` of one request.

    With ``OutputKind.DELTA`` an output holds what is new since the last one that was taken; otherwise it is cumulative.

    Args:
        request_id: the id that the outputs carry; the request's own if absent.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, request_id: str | None = None) -> None:
        self._request = request
        self._request_id = request.request_id if request_id is None else request_id
        self._tokenizer = tokenizer if request.params.detokenize else None
        self._choices = [self._new_choice(i) for i in range(request.params.n)]
        self._fresh: set[int] = set()
        self._prompt_logprobs: PromptLogprobs | None = None
        self._num_cached = 0
        self._metrics: RequestMetrics | None = None
        self._error: str | None = None
        self._embedding: tuple[float, ...] | None = None
        self._unreported = [0] * request.params.n
        self._started = [False] * request.params.n

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self._choices)

    @property
    def request(self) -> Request:
        return self._request

    def add(self, delta: OutputDelta) -> None:
        choice = self._choices[delta.index]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        for entry in delta.logprobs:
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + entry.logprob
            assert choice.logprobs is not None
            choice.logprobs.append(self._position(entry))
        choice.finish_reason = delta.finish_reason and delta.finish_reason.value
        choice.stop_reason = delta.stop_reason
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = self._prompt(delta.prompt_logprobs)
        if delta.index == 0:
            self._num_cached = delta.num_cached_tokens
        self._metrics = delta.metrics or self._metrics
        self._error = delta.error or self._error
        self._embedding = delta.embedding or self._embedding
        self._unreported[delta.index] += len(delta.token_ids)
        self._fresh.add(delta.index)

    @property
    def due(self) -> bool:
        """Whether there is something to report now, by the request's output kind and stream interval."""
        kind, interval = self._request.params.output_kind, self._request.params.stream_interval or 1
        if self.finished:
            return bool(self._fresh)
        if kind is OutputKind.FINAL_ONLY:
            return False
        return any(
            self._unreported[i] >= interval or self._choices[i].finished or self._is_first(i)
            for i in self._fresh
        )

    def take(self) -> RequestOutput:
        """The output as it is now; marks it as reported."""
        delta = self._request.params.output_kind is OutputKind.DELTA
        chosen = sorted(self._fresh) if delta else range(len(self._choices))
        outputs = [self._choices[i] if delta else _copy(self._choices[i]) for i in chosen]
        for i in chosen:
            self._started[i] |= self._unreported[i] > 0
            self._unreported[i] = 0
            if delta:
                self._choices[i] = self._continue(self._choices[i])
        self._fresh.clear()
        prompt_logprobs = self._prompt_logprobs
        if delta:
            self._prompt_logprobs = None
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._request.prompt,
            prompt_token_ids=list(self._request.prompt_token_ids),
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self._num_cached,
            metrics=self._metrics,
            error=self._error,
            embedding=self._embedding,
        )

    def _is_first(self, index: int) -> bool:
        """The first token is reported at once, whatever the interval."""
        return not self._started[index] and self._unreported[index] > 0

    def _new_choice(self, index: int) -> CompletionOutput:
        params = self._request.params
        return CompletionOutput(index, logprobs=_container(params) if _wants_logprobs(params) else None)

    def _continue(self, choice: CompletionOutput) -> CompletionOutput:
        fresh = self._new_choice(choice.index)
        fresh.finish_reason, fresh.stop_reason = choice.finish_reason, choice.stop_reason
        fresh.cumulative_logprob = choice.cumulative_logprob
        return fresh

    def _prompt(self, entries: Seq[TokenLogprobs | None]) -> PromptLogprobs:
        if self._request.params.flat_logprobs:
            flat = FlatLogprobs()
            for entry in entries:
                flat.append(None if entry is None else self._position(entry))
            return flat
        return [None if entry is None else self._position(entry) for entry in entries]

    def _position(self, entry: TokenLogprobs) -> PositionLogprobs:
        result = {entry.token_id: Logprob(entry.logprob, entry.rank, self._decode(entry.token_id))}
        for rank, (token, value) in enumerate(entry.top, start=1):
            result.setdefault(token, Logprob(value, rank, self._decode(token)))
        for token, value in entry.named:
            result.setdefault(token, Logprob(value, None, self._decode(token)))
        return result

    def _decode(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else token_text(self._tokenizer, token_id)


def _wants_logprobs(params: SamplingParams) -> bool:
    return params.logprobs is not None or bool(params.logprob_token_ids)


def _container(params: SamplingParams) -> Logprobs:
    return FlatLogprobs() if params.flat_logprobs else []


def _copy(choice: CompletionOutput) -> CompletionOutput:
    """A snapshot: later tokens do not change what was handed out."""
    logprobs = choice.logprobs
    if isinstance(logprobs, list):
        logprobs = list(logprobs)
    elif logprobs is not None:
        logprobs = logprobs.copy()
    return CompletionOutput(
        choice.index,
        choice.text,
        list(choice.token_ids),
        choice.cumulative_logprob,
        logprobs,
        choice.finish_reason,
        choice.stop_reason,
    )
