"""What every generating endpoint does with the engine: submit, merge news, count usage, report, clean up.

An endpoint turns its request into ``EngineRequest``s and a ``Call``, and then::

    generation = await begin(context, call, interval)     # queued; RequestError, QueueFullError, EngineDeadError
    ...
    async for news in generation.news():                  # stream: merged news, one entry for each choice that has any
        ...
    generation.usage                                      # counts so far; final when news() has ended
    return EventStream(chunks(), context.to_error, generation.aclose)

or, for an answer as a whole::

    choices = await generation.collect(request.receive)   # one ChoiceNews per choice; stops when the client leaves

A choice of a call has the number ``prompt index * n + choice index``. A choice that fails fails its whole call:
``news`` raises an ``APIError`` and the rest is aborted, so nobody takes a part for the whole. Whoever begins a
generation calls ``aclose``, more than once if it likes: it aborts what still runs, and tells the observers.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from starlette.types import Receive

from jaxinfer.engine.client import OutputStream
from jaxinfer.engine.deltas import OutputDelta, TokenLogprobs
from jaxinfer.outputs import RequestMetrics
from jaxinfer.request import FinishReason
from serve.context import ServerContext
from serve.errors import APIError
from serve.observers import Call, CallObservation
from serve.sse import until_disconnect

PromptLogprobs = tuple[TokenLogprobs | None, ...]


@dataclass(slots=True)
class ChoiceNews:
    """What became final of one choice since its last news.

    Attributes:
        choice: its number in the call; ``prompt`` is the number of its prompt.
        first: nothing of the choice was given out before.
        token_ids, logprobs, text: they describe the same tokens.
        prompt_logprobs: of the prompt, with the first news of each choice, if they were asked for.
        finish_reason: stop, length or repetition, with the last news.
    """

    choice: int
    prompt: int
    first: bool
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: PromptLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None

    def add(self, delta: OutputDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason and delta.finish_reason.value
        self.stop_reason = delta.stop_reason

    def append(self, later: "ChoiceNews") -> None:
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass
class UsageCounts:
    """Tokens of a call. A prompt counts once, however many choices it has; a token that ended a choice and is not part
    of its text is not counted.

    Attributes:
        cached: prompt tokens that the prefix cache had.
        completion_of: output tokens by choice.
    """

    prompt: int
    cached: int
    completion_of: list[int]

    @property
    def completion(self) -> int:
        return sum(self.completion_of)


class Generation:
    """A call that the engine admitted; ``begin`` makes it.

    Attributes:
        usage: counts of what was given out so far.
        metrics: times of the choice that finished last; of use for calls with a single choice.
    """

    def __init__(self, call: Call, stream: OutputStream, observation: CallObservation, interval: int) -> None:
        self.call = call
        self.metrics: RequestMetrics | None = None
        self._stream = stream
        self._observation = observation
        self._interval = interval
        self._prompt_of = {request.request_id: i for i, request in enumerate(call.requests)}
        self._n = max(request.params.n for request in call.requests)
        self._held: dict[int, ChoiceNews] = {}
        self._scored = any(request.params.prompt_logprobs is not None for request in call.requests)
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._started = [False] * self.num_choices
        self._error: str | None = None
        self._closed = False
        prompt_tokens = sum(len(request.prompt_token_ids) for request in call.requests)
        self.usage = UsageCounts(prompt_tokens, 0, [0] * self.num_choices)

    @property
    def num_choices(self) -> int:
        return self._n * len(self.call.requests)

    async def news(self) -> AsyncGenerator[list[ChoiceNews], None]:
        """News of the choices until all have finished. News that pile up while the consumer is busy are merged.

        Raises:
            APIError: a choice failed.
            EngineDeadError: the engine did.
        """
        try:
            async for deltas in self._stream:
                self._observation.news(deltas)
                if ready := self._take(deltas):
                    yield ready
        except Exception as error:
            self._error = str(error)
            raise

    async def collect(self, receive: Receive) -> list[ChoiceNews]:
        """All choices, whole, in order.

        Raises:
            ClientDisconnectedError: the client left; what it asked for was aborted.
            APIError, EngineDeadError: as ``news``.
        """
        whole: dict[int, ChoiceNews] = {}

        async def run() -> None:
            async for batch in self.news():
                for news in batch:
                    if news.first:
                        whole[news.choice] = news
                    else:
                        whole[news.choice].append(news)

        try:
            await until_disconnect(receive, run())
        finally:
            await self.aclose()
        return [whole[i] for i in range(self.num_choices)]

    async def aclose(self) -> None:
        """Aborts what still runs and tells the observers that the call is over."""
        if not self._closed:
            self._closed = True
            self._observation.ended(self._error)
            await self._stream.aclose()

    def _take(self, deltas: Sequence[OutputDelta]) -> list[ChoiceNews]:
        held, interval = self._held, self._interval
        for delta in deltas:
            if delta.error is not None or delta.finish_reason in _FAILED:
                raise _failure(delta)
            prompt = self._prompt_of[delta.request_id]
            choice = prompt * self._n + delta.index
            self._count(choice, delta)
            if delta.prompt_logprobs is not None:
                self._prompt_logprobs[prompt] = delta.prompt_logprobs
            news = held.get(choice)
            if news is None:
                held[choice] = self._begin(choice, prompt, delta)
            else:
                news.add(delta)
        ready = [news for news in held.values() if self._is_due(news, interval)]
        for news in ready:
            del held[news.choice]
        return ready

    def _is_due(self, news: ChoiceNews, interval: int) -> bool:
        if not news.first:
            return news.finish_reason is not None or len(news.token_ids) >= interval
        if self._scored:  # siblings of a prompt's first choice may be faster than it
            news.prompt_logprobs = self._prompt_logprobs.get(news.prompt)
            return news.prompt_logprobs is not None
        return True

    def _begin(self, choice: int, prompt: int, delta: OutputDelta) -> ChoiceNews:
        first, self._started[choice] = not self._started[choice], True
        return ChoiceNews(
            choice=choice,
            prompt=prompt,
            first=first,
            text=delta.text,
            token_ids=list(delta.token_ids),
            logprobs=list(delta.logprobs),
            prompt_logprobs=None,
            finish_reason=delta.finish_reason and delta.finish_reason.value,
            stop_reason=delta.stop_reason,
        )

    def _count(self, choice: int, delta: OutputDelta) -> None:
        if delta.index == 0 and not self._started[choice]:
            self.usage.cached += delta.num_cached_tokens
        self.usage.completion_of[choice] += len(delta.token_ids)
        if delta.metrics is not None:
            self.metrics = delta.metrics


_FAILED = (FinishReason.ERROR, FinishReason.ABORT)


def _failure(delta: OutputDelta) -> APIError:
    """A choice that did not end by itself must not look as if it had."""
    if delta.finish_reason is FinishReason.ABORT and delta.error is None:
        return APIError(503, "the request was aborted because the server shuts down")
    return APIError(500, delta.error or "the generation failed")


async def begin(context: ServerContext, call: Call, interval: int | None = None) -> Generation:
    """Queues all requests of a call, or none.

    Args:
        call: all of its requests ask for the same number of choices.
        interval: tokens of a choice between its news; the first and the last ones come at once.

    Raises:
        RequestError, QueueFullError, EngineDeadError: see ``EngineClient.submit``.
    """
    stream = await context.client.submit(call.requests)
    return Generation(call, stream, context.observers.started(call), interval or 1)
