"""``/v1/chat/completions``."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from serve.answers import metrics_of, usage_of
from serve.body import json_answer, read_body
from serve.chat_call import ChatCall, begin_chat
from serve.chat_output import ChatLogprobWriter, ChatOptions, FoldedChoice, chunk_choices
from serve.context import ServerContext
from serve.conversation import Conversations
from serve.ids import new_id
from serve.openapi import GENERATING, answer, errors, json_body
from serve.protocol.chat import ChatAnswer, ChatChunk, ChatRequest, ChunkChoice, Delta
from serve.protocol.common import Metrics, Usage
from serve.routes.models import check_model
from serve.sse import DONE, EventStream, event, until_disconnect
from serve.tokenize import need_tokenizer

LONG_PROMPT = 256
"""Tokens from which the log-probabilities of a prompt are spelled beside the event loop."""

_encode = msgspec.json.Encoder().encode


def router(context: ServerContext) -> APIRouter:
    routes = APIRouter(tags=["generate"])
    client, server = context.client, context.config.server
    conversations = Conversations(client.tokenizer, client.chat_template, server)

    @routes.post(
        "/v1/chat/completions",
        summary="Answer a conversation",
        responses={**answer(ChatAnswer, stream=True), **errors(*GENERATING)},
        openapi_extra=json_body(ChatRequest),
    )
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        model = check_model(context, body.model)
        options = _options(context, body)
        call_id = new_id("chatcmpl", body.request_id)
        call = await begin_chat(context, conversations, body, request, call_id, model)
        answering = _Answering(call, body, options, server.force_include_usage)
        if body.stream:
            return EventStream(
                answering.stream(),
                context.to_error,
                call.generation.aclose,
                keep_alive=server.sse_keep_alive,
            )
        try:
            return json_answer(await until_disconnect(request.receive, answering.whole()))
        finally:
            await call.generation.aclose()

    return routes


def _options(context: ServerContext, body: ChatRequest) -> ChatOptions:
    return ChatOptions(
        reasoning_field=context.config.server.reasoning_field,
        writer=ChatLogprobWriter(
            need_tokenizer(context.client.tokenizer, "messages"), bool(body.return_tokens_as_token_ids)
        ),
        num_top=body.num_top_logprobs,
        token_ids=bool(body.return_token_ids),
    )


@dataclass
class _Answering:
    """Answers one chat."""

    call: ChatCall
    body: ChatRequest
    options: ChatOptions
    force_usage: bool

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Framed chunks, in the order that clients know: roles, echo, deltas, usage, ``[DONE]``."""
        asked = self.body.stream_options
        last = self.force_usage or (asked is not None and asked.include_usage is True)
        continuous = last and asked is not None and asked.continuous_usage_stats is True
        first = True
        async for choices in self._choices():
            chunks = [self._chunk([choice]) for choice in choices]
            if first and self.options.token_ids:
                chunks[0].prompt_token_ids = list(self.call.request.prompt_token_ids)
            if continuous:
                for chunk in chunks:
                    chunk.usage = self._usage()
            first = False
            if chunks:
                yield b"".join([event(_encode(chunk)) for chunk in chunks])
        if last:
            chunk = self._chunk([])
            chunk.usage = self._usage()
            chunk.metrics = self._metrics()
            yield event(_encode(chunk))
        yield DONE

    async def whole(self) -> ChatAnswer:
        """The answer that the chunks add up to."""
        folded = [FoldedChoice(index) for index in range(self.call.generation.num_choices)]
        async for choices in self._choices():
            for choice in choices:
                folded[choice.index].add(choice)
        call, body = self.call, self.body
        result = ChatAnswer(
            id=call.id,
            created=call.created,
            model=call.model,
            choices=[choice.choice(self._role, self.options) for choice in folded],
            usage=self._usage(),
        )
        if self.options.token_ids:
            result.prompt_token_ids = list(call.request.prompt_token_ids)
        scored, num_top = call.prompt_logprobs, body.prompt_logprobs
        if scored is not None and num_top is not None:
            write = self.options.writer.prompt
            long = len(scored) > LONG_PROMPT
            result.prompt_logprobs = (
                await asyncio.to_thread(write, scored, num_top) if long else write(scored, num_top)
            )
        result.metrics = self._metrics()
        return result

    async def _choices(self) -> AsyncGenerator[list[ChunkChoice], None]:
        """The parts of the chunks. Roles come with the first token, as clients take them for it."""
        first = True
        async for batch in self.call.news():
            choices = [part for choice, news in batch for part in chunk_choices(choice, news, self.options)]
            yield [*self._opening(), *choices] if first else choices
            first = False

    def _opening(self) -> list[ChunkChoice]:
        indices = range(self.call.generation.num_choices)
        opening = [ChunkChoice(index, Delta(role=self._role, content="")) for index in indices]
        if self.body.echo and (text := self._last_text()):
            opening += [ChunkChoice(index, Delta(content=text)) for index in indices]
        return opening

    @property
    def _role(self) -> str:
        """A message that is continued keeps its role."""
        if self.body.continue_final_message:
            return str(self.body.messages[-1].get("role"))
        return "assistant"

    def _last_text(self) -> str:
        """What ``echo`` repeats."""
        message = self.body.messages[-1]
        content = message.get("content")
        if message.get("role") != self._role or content is None:
            return ""
        if isinstance(content, str):
            return content
        return "\n".join(part if isinstance(part, str) else part.get("text", "") for part in content)

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(self.call.id, self.call.created, self.call.model, choices)

    def _usage(self) -> Usage:
        return usage_of(self.call.generation.usage, self.call.reasoning_tokens)

    def _metrics(self) -> Metrics | UnsetType:
        """Times of the request, if they are asked for."""
        times = self.call.generation.metrics
        if not self.body.return_metrics or times is None:
            return UNSET
        return metrics_of(times, self.call.generation.usage.completion)
