"""Whether the server works, and what it is: for probes, load balancers and scrapers."""

from fastapi import APIRouter
from starlette.responses import Response

from jaxinfer.engine.client import EngineDeadError, EngineDrainingError
from serve.body import json_answer
from serve.context import ServerContext, package_version
from serve.errors import APIError
from serve.openapi import answer, errors, plain
from serve.protocol.models import Health, Load, Version


def router(context: ServerContext) -> APIRouter:
    routes = APIRouter(tags=["state"])
    # Some load balancers ask with HEAD.

    def check() -> Response:
        try:
            context.client.check_health()
        except EngineDeadError as error:
            raise APIError(503, f"the engine does not work: {error}") from None
        return json_answer(Health("ok"))

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", summary="Is the engine alive?", responses={**answer(Health), **errors(503)})
    async def health() -> Response:
        return check()

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", summary="Can requests be served?", responses={**answer(Health), **errors(503)})
    async def ready() -> Response:
        try:
            context.client.check_ready()
        except (EngineDeadError, EngineDrainingError) as error:
            raise APIError(503, f"no requests are taken: {error}") from None
        return json_answer(Health("ok"))

    @routes.get("/version", summary="Version of the server", responses=answer(Version))
    async def show_version() -> Response:
        return json_answer(Version(package_version()))

    @routes.get("/load", summary="How busy the engine is", responses={**answer(Load), **errors(401)})
    async def load() -> Response:
        now = context.client.snapshot()
        usage = now.used_blocks / max(now.num_blocks, 1)
        return json_answer(
            Load(now.running + now.waiting, now.running, now.waiting, now.waiting_tokens, usage)
        )

    @routes.get("/metrics", summary="Prometheus metrics", responses=plain("text/plain", "Metrics."))
    async def metrics() -> Response:
        return Response(context.metrics.expose(), headers={"Content-Type": context.metrics.content_type})

    return routes
