"""``/v1/embeddings``: pooled hidden states of a decoder model."""

import base64
import time

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxinfer.engine.client import EngineRequest
from jaxinfer.request import RequestError
from jaxinfer.sampling_params import SamplingParams
from serve.body import json_answer, read_body
from serve.context import ServerContext
from serve.errors import APIError
from serve.ids import engine_request_id, new_id
from serve.observers import Call
from serve.openapi import GENERATING, answer, errors, json_body
from serve.protocol.completions import read_prompts
from serve.protocol.embeddings import Embedding, EmbeddingsAnswer, EmbeddingsRequest, EmbeddingsUsage
from serve.routes.models import check_model
from serve.sse import until_disconnect
from serve.tokenize import PromptEncoder, need_tokenizer

_PARAMS = SamplingParams(max_tokens=0, detokenize=False)


def router(context: ServerContext) -> APIRouter:
    routes = APIRouter(tags=["embeddings"])
    encoder = None
    if context.client.tokenizer is not None:
        encoder = PromptEncoder(context.client.tokenizer, context.client.limits)

    @routes.post(
        "/v1/embeddings",
        summary="Embeddings of texts or token ids",
        responses={**answer(EmbeddingsAnswer), **errors(*GENERATING)},
        openapi_extra=json_body(EmbeddingsRequest),
    )
    async def embeddings(request: Request) -> Response:
        received = time.monotonic()
        body = await read_body(request, EmbeddingsRequest)
        model = check_model(context, body.model)
        prompts = await _prompts(context, encoder, body)
        call_id = new_id("embd")
        call = Call(
            call_id=call_id,
            operation="embeddings",
            model=model,
            requests=[
                EngineRequest(
                    engine_request_id(call_id, i),
                    tuple(ids),
                    _PARAMS,
                    body.priority or 0,
                    pooling=body.pooling or "mean",
                )
                for i, ids in enumerate(prompts)
            ],
            stream=False,
            received=received,
            headers=dict(request.headers),
        )
        vectors = await until_disconnect(request.receive, _run(context, call))
        if body.dimensions not in (None, len(vectors[0])):
            raise _wrong_dimensions(body.dimensions, len(vectors[0]))
        tokens = sum(map(len, prompts))
        data = [
            Embedding(i, _encoded(vector, body.encoding_format or "float"))
            for i, vector in enumerate(vectors)
        ]
        return json_answer(EmbeddingsAnswer(data, model, EmbeddingsUsage(tokens, tokens)))

    return routes


async def _prompts(
    context: ServerContext, encoder: PromptEncoder | None, body: EmbeddingsRequest
) -> list[list[int]]:
    """Token ids of every input.

    Raises:
        RequestError: nothing is given, or too much.
    """
    given = read_prompts(body.input, context.config.server.max_prompts, "input")
    texts = [item for item in given if isinstance(item, str)]
    if not texts:
        return [item for item in given if not isinstance(item, str)]
    need_tokenizer(context.client.tokenizer, "input")
    assert encoder is not None
    return await encoder.encode(texts, body.add_special_tokens is not False)


async def _run(context: ServerContext, call: Call) -> list[np.ndarray]:
    """The vectors of a call, each of length 1, in float32.

    Raises:
        RequestError, QueueFullError, EngineDeadError: see ``EngineClient.submit``.
        APIError: a request failed, or the server shuts down.
    """
    vectors: dict[str, np.ndarray] = {}
    async with await context.client.submit(call.requests) as stream:
        observation = context.observers.started(call)
        failure: str | None = "the client left"
        try:
            async for deltas in stream:
                observation.news(deltas)
                for delta in deltas:
                    if delta.embedding is None:
                        failure = delta.error or "the request was aborted"
                        raise APIError(500 if delta.error else 503, failure)
                    vector = np.asarray(delta.embedding, np.float32)
                    vectors[delta.request_id] = vector / max(float(np.linalg.norm(vector)), 1e-12)
            failure = None
        finally:
            observation.ended(failure)
    return [vectors[request.request_id] for request in call.requests]


def _wrong_dimensions(given: int | None, right: int) -> RequestError:
    return RequestError(
        f"dimensions: {given} given, but the embeddings of this model have {right}; they cannot be shortened",
        "dimensions",
    )


def _encoded(vector: np.ndarray, form: str) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    values: list[float] = vector.tolist()
    return values
