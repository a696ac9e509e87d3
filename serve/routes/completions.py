"""``/v1/completions``."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxinfer.engine.client import EngineRequest
from jaxinfer.request import RequestError
from serve.answers import metrics_of, usage_of
from serve.body import json_answer, read_body
from serve.completion_output import CompletionOptions, CompletionWriter
from serve.context import ServerContext
from serve.generation import ChoiceNews, Generation, begin
from serve.ids import engine_request_id, new_id
from serve.logprobs import LogprobWriter
from serve.observers import Call
from serve.openapi import GENERATING, answer, errors, json_body
from serve.protocol.completions import CompletionAnswer, CompletionRequest, Prompts, read_prompts
from serve.routes.models import check_model
from serve.sampling_request import check_counts, output_form, sampling_params, truncated
from serve.sse import DONE, ChunkEncoder, EventStream
from serve.tokenize import PromptEncoder, need_tokenizer

LARGE_LOGPROBS = 1000
"""Entries from which an answer is written on a thread."""


@dataclass(frozen=True)
class _Prepared:
    """A validated request: ``texts`` are the prompts that were texts, or Nones."""

    response_id: str
    model: str
    texts: Sequence[str | None]
    requests: tuple[EngineRequest, ...]
    options: CompletionOptions


def router(context: ServerContext) -> APIRouter:
    routes = APIRouter(tags=["generate"])
    encoder = None
    if context.client.tokenizer is not None:
        encoder = PromptEncoder(context.client.tokenizer, context.client.limits)

    @routes.post(
        "/v1/completions",
        summary="Continue prompts",
        responses={**answer(CompletionAnswer, stream=True), **errors(*GENERATING)},
        openapi_extra=json_body(CompletionRequest),
    )
    async def completions(request: Request) -> Response:
        received = time.monotonic()
        body = await read_body(request, CompletionRequest)
        prepared = await _prepare(context, encoder, body)
        call = Call(
            call_id=prepared.response_id,
            operation="text_completion",
            model=prepared.model,
            requests=prepared.requests,
            stream=body.stream,
            received=received,
            headers=dict(request.headers),
        )
        generation = await begin(context, call, body.stream_interval)
        if body.stream:
            chunks = _chunks(context, generation, body, prepared)
            keep_alive = context.config.server.sse_keep_alive
            return EventStream(chunks, context.to_error, generation.aclose, keep_alive=keep_alive)
        return await _whole(request, generation, body, prepared)

    return routes


async def _prepare(
    context: ServerContext, encoder: PromptEncoder | None, body: CompletionRequest
) -> _Prepared:
    """Checks counts first, then everything else; nothing is queued."""
    server = context.config.server
    model = check_model(context, body.model)
    check_counts(body, server)
    prompts = read_prompts(body.prompt, server.max_prompts)
    num_choices = len(prompts) * (body.n or 1)
    if num_choices > server.max_prompts:
        raise RequestError(
            f"n: {num_choices} choices for all prompts, this server allows {server.max_prompts}", "n"
        )
    if body.return_metrics and num_choices > 1:
        raise RequestError("return_metrics: only for one prompt with one choice", "return_metrics")
    params = sampling_params(
        _scored(body),
        context.client.sampling_defaults,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        detokenize=context.client.tokenizer is not None,
        structured_outputs=output_form(body.structured_outputs, body.response_format),
    )
    texts, ids = await _encode(context, encoder, prompts, body)
    request_id = body.request_id or uuid.uuid4().hex
    requests = tuple(
        EngineRequest(
            request_id=engine_request_id(request_id, i),
            prompt_token_ids=tuple(tokens),
            params=params,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
        )
        for i, tokens in enumerate(ids)
    )
    return _Prepared(new_id("cmpl", body.request_id), model, texts, requests, _options(context, body))


def _scored(body: CompletionRequest) -> CompletionRequest:
    """With ``echo``, the prompt's tokens are reported like those of the answer."""
    if not body.echo or body.logprobs is None:
        return body
    most = max(body.logprobs, body.prompt_logprobs or 0)
    return body.model_copy(update={"prompt_logprobs": most})


async def _encode(
    context: ServerContext, encoder: PromptEncoder | None, prompts: Prompts, body: CompletionRequest
) -> tuple[list[str | None], list[list[int]]]:
    """Texts and token ids of the prompts; no text where there was none, or where it was truncated."""
    texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
    given = [prompt for prompt in prompts if isinstance(prompt, str)]
    if given:
        need_tokenizer(context.client.tokenizer, "prompt")
        assert encoder is not None
        bounded = body.truncate_prompt_tokens is None
        ids = await encoder.encode(given, body.add_special_tokens, bounded=bounded)
    else:
        ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    cut = [truncated(tokens, body, context.client.limits.max_model_len, body.max_tokens) for tokens in ids]
    return [text if len(c) == len(t) else None for text, c, t in zip(texts, cut, ids)], cut


def _options(context: ServerContext, body: CompletionRequest) -> CompletionOptions:
    return CompletionOptions(
        tokenizer=context.client.tokenizer,
        writer=LogprobWriter(context.client.tokenizer, bool(body.return_tokens_as_token_ids)),
        echo=body.echo,
        num_top=body.logprobs,
        num_prompt_top=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids),
        skip_special_tokens=body.skip_special_tokens is not False,
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
    )


def _writers(prepared: _Prepared, generation: Generation) -> list[CompletionWriter]:
    n = generation.num_choices // len(prepared.requests)
    return [
        CompletionWriter(
            i, prepared.texts[i // n], prepared.requests[i // n].prompt_token_ids, prepared.options
        )
        for i in range(generation.num_choices)
    ]


async def _whole(
    request: Request, generation: Generation, body: CompletionRequest, prepared: _Prepared
) -> Response:
    writers = _writers(prepared, generation)
    choices = await generation.collect(request.receive)

    def write() -> Response:
        answer = CompletionAnswer(
            id=prepared.response_id,
            created=int(time.time()),
            model=prepared.model,
            choices=[writer.write(choice) for writer, choice in zip(writers, choices)],
            usage=usage_of(generation.usage),
        )
        if body.return_metrics and generation.metrics is not None:
            answer.metrics = metrics_of(generation.metrics, generation.usage.completion)
        return json_answer(answer)

    return await asyncio.to_thread(write) if _takes_long(choices) else write()


def _takes_long(batch: Sequence[ChoiceNews]) -> bool:
    """Whether spelling the log-probabilities would keep the event loop from its work."""
    entries = sum(len(news.logprobs) + len(news.prompt_logprobs or ()) for news in batch)
    return entries > LARGE_LOGPROBS


async def _chunks(
    context: ServerContext, generation: Generation, body: CompletionRequest, prepared: _Prepared
) -> AsyncGenerator[bytes, None]:
    """The events of a stream; all news of one moment go out in one piece."""
    include, continuous = _usage_wanted(context, body)
    chunks = ChunkEncoder(prepared.response_id, "text_completion", prepared.model)
    writers = _writers(prepared, generation)
    scored = prepared.options.num_top is not None
    plain = not (continuous or scored or prepared.options.token_ids)

    def write(batch: Sequence[ChoiceNews]) -> bytes:
        usage = usage_of(generation.usage) if continuous else None
        return b"".join(
            [
                chunks.text(news.choice, news.text)
                if plain and not news.first and news.finish_reason is None
                else chunks.chunk([writers[news.choice].write(news)], usage)
                for news in batch
            ]
        )

    async for batch in generation.news():
        yield await asyncio.to_thread(write, batch) if scored and _takes_long(batch) else write(batch)
    if include:
        metrics = None
        if body.return_metrics and generation.metrics is not None:
            metrics = metrics_of(generation.metrics, generation.usage.completion)
        yield chunks.chunk([], usage_of(generation.usage), metrics)
    yield DONE


def _usage_wanted(context: ServerContext, body: CompletionRequest) -> tuple[bool, bool]:
    """Whether a last chunk carries the usage, and whether every chunk does."""
    forced = context.config.server.force_include_usage
    options = body.stream_options
    include = forced or (options is not None and options.include_usage is True)
    return include, include and options is not None and options.continuous_usage_stats is True
