"""``/v1/models``, and the check of the name that requests give."""

from fastapi import APIRouter
from starlette.responses import Response

from serve.body import json_answer
from serve.context import ServerContext
from serve.errors import APIError
from serve.openapi import answer, errors
from serve.protocol.models import Model, ModelList


def check_model(context: ServerContext, name: str | None) -> str:
    """The name that the answer shows: the one that was asked for, or the first served one.

    Raises:
        APIError: 404, no model has that name.
    """
    if name is None:
        return context.model_names[0]
    if name not in context.model_names:
        known = ", ".join(context.model_names)
        raise APIError(404, f"the model {name[:200]!r} does not exist; this server has: {known}", "model")
    return name


def router(context: ServerContext) -> APIRouter:
    routes = APIRouter(tags=["models"])

    def describe(name: str) -> Model:
        return Model(name, context.started, context.model_names[0], context.client.limits.max_model_len)

    @routes.get("/v1/models", summary="The served names", responses={**answer(ModelList), **errors(401)})
    async def models() -> Response:
        return json_answer(ModelList([describe(name) for name in context.model_names]))

    @routes.get(
        "/v1/models/{model:path}", summary="One served name", responses={**answer(Model), **errors(401, 404)}
    )
    async def model(model: str) -> Response:
        return json_answer(describe(check_model(context, model)))

    return routes
