"""Text to token ids and back."""

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxinfer.request import RequestError
from jaxinfer.sampling_params import SamplingParams
from serve.body import json_answer, read_body
from serve.context import ServerContext
from serve.conversation import Chat, Conversations
from serve.openapi import answer, errors, json_body
from serve.protocol.tokens import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
    TokenizerInfo,
)
from serve.routes.models import check_model
from serve.tokenize import encode, need_tokenizer


def router(context: ServerContext) -> APIRouter:
    routes = APIRouter(tags=["tokens"])
    client = context.client
    conversations = Conversations(client.tokenizer, client.chat_template, context.config.server)

    @routes.post(
        "/tokenize",
        summary="Token ids of a text or a conversation",
        responses={**answer(Tokenized), **errors(400, 401, 404, 413, 500)},
        openapi_extra=json_body(TokenizeRequest),
    )
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeRequest)
        check_model(context, body.model)
        tokenizer = need_tokenizer(client.tokenizer, "prompt")
        if body.prompt is not None:
            ids = await encode(tokenizer, body.prompt, body.add_special_tokens is not False)
        else:
            ids = list((await conversations.prepare(_chat(body), SamplingParams())).prompt_token_ids)
        result = Tokenized(len(ids), client.limits.max_model_len, ids)
        if body.return_token_strs:
            result.token_strs = [tokenizer.token_str(token) for token in ids]
        return json_answer(result)

    @routes.post(
        "/detokenize",
        summary="Text of token ids",
        responses={**answer(Detokenized), **errors(400, 401, 404, 413, 500)},
        openapi_extra=json_body(DetokenizeRequest),
    )
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest)
        check_model(context, body.model)
        tokenizer = need_tokenizer(client.tokenizer, "tokens")
        _check_ids(body.tokens, client.limits.vocab_size)
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, body.skip_special_tokens)
        return json_answer(Detokenized(text))

    @routes.get(
        "/tokenizer_info",
        summary="What the tokenizer is",
        responses={**answer(TokenizerInfo), **errors(400, 401)},
    )
    async def tokenizer_info() -> Response:
        return json_answer(_describe(context))

    return routes


def _check_ids(tokens: Sequence[int], vocab: int) -> None:
    for position, token in enumerate(tokens):
        if not 0 <= token < vocab:
            shown = token if token.bit_length() <= 64 else "too large"
            raise RequestError(
                f"tokens[{position}] is {shown}; allowed: ids of the vocabulary, 0 to {vocab - 1}", "tokens"
            )


def _chat(body: TokenizeRequest) -> Chat:
    assert body.messages is not None
    return Chat(
        messages=body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
        add_special_tokens=body.add_special_tokens is True,
    )


def _describe(context: ServerContext) -> TokenizerInfo:
    tokenizer = need_tokenizer(context.client.tokenizer, "tokenizer")
    bos, eos = tokenizer.bos_token_id, list(tokenizer.eos_token_ids)
    limits = context.client.limits
    return TokenizerInfo(
        vocab_size=tokenizer.vocab_size,
        model_vocab_size=limits.vocab_size,
        bos_token_id=bos,
        bos_token=None if bos is None else tokenizer.token_str(bos),
        eos_token_ids=eos,
        eos_token=tokenizer.token_str(eos[0]) if eos else None,
        add_bos=tokenizer.add_bos,
        chat_template=context.client.chat_template.sources.get("default"),
        max_model_len=limits.max_model_len,
    )
