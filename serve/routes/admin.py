"""What operators do to a running engine: forget cached prefixes, take a profile."""

from fastapi import APIRouter
from starlette.responses import Response

from jaxinfer.request import RequestError
from serve.body import json_answer
from serve.context import ServerContext
from serve.errors import APIError
from serve.openapi import answer, errors
from serve.protocol.models import Profile, ResetCache


def router(context: ServerContext) -> APIRouter:
    routes = APIRouter(tags=["operations"])
    directory = context.config.server.profile_directory

    @routes.post(
        "/reset_prefix_cache",
        summary="Forget the cached prefixes that no running request uses",
        responses={**answer(ResetCache), **errors(401, 500)},
    )
    async def reset_prefix_cache() -> Response:
        return json_answer(ResetCache(await context.client.reset_prefix_cache()))

    @routes.post(
        "/start_profile",
        summary="Start jax.profiler in the engine's process",
        responses={**answer(Profile), **errors(401, 404, 409, 500)},
    )
    async def start_profile() -> Response:
        target = configured()
        try:
            await context.client.start_profile(target)
        except RequestError as error:
            raise APIError(409, str(error)) from None
        return json_answer(Profile(target))

    @routes.post(
        "/stop_profile",
        summary="Stop it and write the profile",
        responses={**answer(Profile), **errors(401, 404, 409, 500)},
    )
    async def stop_profile() -> Response:
        target = configured()
        try:
            await context.client.stop_profile()
        except RequestError as error:
            raise APIError(409, str(error)) from None
        return json_answer(Profile(target))

    def configured() -> str:
        if directory is None:
            raise APIError(404, "profiles are off: set server.profile_directory")
        return directory

    return routes
