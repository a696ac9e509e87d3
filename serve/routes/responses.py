"""``/v1/responses``, the stateless subset."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.body import json_answer, read_body
from serve.chat_call import ChatCall, begin_chat
from serve.chat_output import ChatLogprobWriter
from serve.context import ServerContext
from serve.conversation import Conversations
from serve.errors import APIError
from serve.ids import new_id
from serve.openapi import GENERATING, answer, errors, json_body
from serve.protocol.response_events import (
    Event,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    ResponsesUsage,
)
from serve.protocol.responses import ResponsesRequest
from serve.responses_input import chat_request
from serve.responses_output import ResponseWriter
from serve.routes.models import check_model
from serve.sse import EventStream, until_disconnect
from serve.tokenize import need_tokenizer

_encode = msgspec.json.Encoder().encode


def router(context: ServerContext) -> APIRouter:
    routes = APIRouter(tags=["generate"])
    client, server = context.client, context.config.server
    conversations = Conversations(client.tokenizer, client.chat_template, server)

    @routes.post(
        "/v1/responses",
        summary="Answer a conversation, as items",
        responses={**answer(ResponseObject, stream=True), **errors(*GENERATING)},
        openapi_extra=json_body(ResponsesRequest),
    )
    async def responses(request: Request) -> Response:
        body = await read_body(request, ResponsesRequest)
        model = check_model(context, body.model)
        writer = ChatLogprobWriter(need_tokenizer(client.tokenizer, "input"), False)
        chat = chat_request(body)
        call_id = new_id("resp", body.request_id).replace("-", "_", 1)
        call = await begin_chat(context, conversations, chat, request, call_id, model)
        answering = _Answering(call, body, writer, _response(body, call))
        if body.stream:
            return EventStream(
                answering.stream(),
                context.to_error,
                call.generation.aclose,
                answering.error_events,
                keep_alive=server.sse_keep_alive,
            )
        try:
            return json_answer(await until_disconnect(request.receive, answering.whole()))
        finally:
            await call.generation.aclose()

    return routes


@dataclass
class _Answering:
    """Answers one call."""

    call: ChatCall
    body: ResponsesRequest
    logprobs: ChatLogprobWriter
    response: ResponseObject

    def __post_init__(self) -> None:
        self.writer = ResponseWriter(self.response)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async for events in self._events():
            yield _framed(events)

    def error_events(self, error: APIError) -> bytes:
        """How the stream ends after an error."""
        return _framed(self.writer.fail(error.message))

    async def whole(self) -> ResponseObject:
        async for _ in self._events():
            pass
        return self.response

    async def _events(self) -> AsyncGenerator[list[Event], None]:
        """The events of each step; the first ones come with the first token, so that earlier errors have a status."""
        first, finish_reason = True, "stop"
        async for batch in self.call.news():
            if first:
                yield self.writer.begin()
                first = False
            for _, news in batch:
                logprobs = []
                if self.body.wants_logprobs:
                    num_top = self.body.top_logprobs or 0
                    logprobs = [self.logprobs.chat(entry, num_top) for entry in news.logprobs]
                if events := self.writer.add(news.events, logprobs):
                    yield events
                finish_reason = news.finish_reason or finish_reason
        yield self.writer.end(finish_reason, self._usage())

    def _usage(self) -> ResponsesUsage:
        counts = self.call.generation.usage
        return ResponsesUsage(
            input_tokens=counts.prompt,
            input_tokens_details=InputTokensDetails(counts.cached),
            output_tokens=counts.completion,
            output_tokens_details=OutputTokensDetails(self.call.reasoning_tokens),
            total_tokens=counts.prompt + counts.completion,
        )


def _framed(events: Sequence[Event]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event.type.encode(), _encode(event)) for event in events)


def _response(body: ResponsesRequest, call: ChatCall) -> ResponseObject:
    """The answer before anything is written."""
    params, choice = call.request.params, body.tool_choice
    form = body.text.format.model_dump(by_alias=True, exclude_none=True) if body.text else {"type": "text"}
    return ResponseObject(
        id=call.id,
        created_at=call.created,
        status="in_progress",
        model=call.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        tool_choice="auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        temperature=params.temperature,
        top_p=params.top_p,
        text={"format": form},
        reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        metadata=body.metadata or {},
        top_logprobs=body.top_logprobs or 0,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        user=body.user,
    )
