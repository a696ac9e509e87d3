"""From a chat request to a running generation and the readers of its choices: what chat and responses share."""

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fastapi import Request

from jaxinfer.engine.client import EngineRequest
from jaxinfer.request import RequestError
from jaxinfer.sampling_params import SamplingParams
from serve.choices import ChatNews, ChoiceReader, ReasoningCount
from serve.context import ServerContext
from serve.conversation import Chat, Conversations, PreparedChat
from serve.generation import Generation, PromptLogprobs, begin
from serve.ids import engine_request_id
from serve.observers import Call
from serve.protocol.chat import ChatRequest
from serve.sampling_request import check_counts, output_form, sampling_params, truncated
from serve.tokenize import need_tokenizer


@dataclass
class ChatCall:
    """A chat that the engine admitted.

    Attributes:
        id: what the client sees.
        model: the name that the answer shows.
        created: unix time.
        request: the only one of the call.
        readers: one per choice.
        prompt_logprobs: set with the first news, if the request asks for them.
    """

    id: str
    model: str
    created: int
    request: EngineRequest
    generation: Generation
    readers: list[ChoiceReader]
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def reasoning_tokens(self) -> int:
        return sum(reader.reasoning_tokens for reader in self.readers)

    async def news(self) -> AsyncIterator[list[tuple[int, ChatNews]]]:
        """What the client may learn, with the numbers of the choices; lists may be empty. The first one comes with
        the first token."""
        async for batch in self.generation.news():
            if self.prompt_logprobs is None:
                self.prompt_logprobs = next((n.prompt_logprobs for n in batch if n.prompt_logprobs), None)
            read = [(news.choice, self.readers[news.choice].read(news)) for news in batch]
            yield [(choice, news) for choice, news in read if not news.empty]


async def begin_chat(
    context: ServerContext,
    conversations: Conversations,
    request: ChatRequest,
    http: Request,
    call_id: str,
    model: str,
) -> ChatCall:
    """Makes the prompt of a chat and queues it.

    Args:
        call_id: what the client sees.
        model: the name that the answer shows.

    Raises:
        RequestError, InvalidParamsError, ChatTemplateError: the request is not valid.
        QueueFullError, EngineDeadError: see ``EngineClient.submit``.
    """
    received = time.monotonic()
    _check(request)
    check_counts(request, context.config.server)
    prepared = await conversations.prepare(_chat(request), _params(context, request))
    engine_request = _engine_request(context, request, prepared, call_id)
    call = Call(
        call_id=call_id,
        operation="chat",
        model=model,
        requests=[engine_request],
        stream=bool(request.stream),
        received=received,
        headers=dict(http.headers),
    )
    generation = await begin(context, call, request.stream_interval)
    readers = _readers(context, request, prepared)
    return ChatCall(call_id, model, int(time.time()), engine_request, generation, readers)


def _readers(context: ServerContext, request: ChatRequest, prepared: PreparedChat) -> list[ChoiceReader]:
    tokenizer = need_tokenizer(context.client.tokenizer, "messages")
    return [
        ChoiceReader(
            prepared.new_parser(),
            named=prepared.tools.choice == "named",
            include_reasoning=request.include_reasoning is not False,
            reasoning=ReasoningCount(tokenizer.token_bytes) if prepared.reasoning else None,
        )
        for _ in range(prepared.params.n)
    ]


def _check(request: ChatRequest) -> None:
    """Fields that do not fit together."""
    options = request.stream_options
    if options is not None and not request.stream:
        raise RequestError("stream_options: only with stream=true", "stream_options")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise RequestError("stream_options: continuous_usage_stats needs include_usage", "stream_options")
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs: only with logprobs=true", "top_logprobs")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs: not with stream=true", "prompt_logprobs")
    if request.return_metrics and (request.n or 1) > 1:
        raise RequestError("return_metrics: only with one choice", "return_metrics")
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message: only with add_generation_prompt=false", "continue_final_message"
        )


def _params(context: ServerContext, request: ChatRequest) -> SamplingParams:
    most = request.max_completion_tokens
    return sampling_params(
        request,
        context.client.sampling_defaults,
        max_tokens=request.max_tokens if most is None else most,
        logprobs=request.num_top_logprobs,
        structured_outputs=output_form(request.structured_outputs, request.response_format),
    )


def _chat(request: ChatRequest) -> Chat:
    choice = request.tool_choice
    continues = bool(request.continue_final_message)
    return Chat(
        messages=request.messages,
        tools=request.tools,
        tool_choice=choice if choice is None or isinstance(choice, str) else choice.model_dump(),
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=request.reasoning_effort,
        add_generation_prompt=not continues and request.add_generation_prompt is not False,
        continue_final_message=continues,
        add_special_tokens=bool(request.add_special_tokens),
        documents=request.documents,
        template_kwargs=request.chat_template_kwargs,
    )


def _engine_request(
    context: ServerContext, request: ChatRequest, prepared: PreparedChat, call_id: str
) -> EngineRequest:
    limits, params = context.client.limits, prepared.params
    ids = truncated(list(prepared.prompt_token_ids), request, limits.max_model_len, params.max_tokens)
    if not ids:
        raise RequestError("messages: the chat template makes an empty prompt of them", "messages")
    return EngineRequest(
        request_id=engine_request_id(request.request_id or uuid.uuid4().hex, 0),
        prompt_token_ids=tuple(ids),
        params=params,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
    )
