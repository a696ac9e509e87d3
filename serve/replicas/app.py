"""The HTTP application of an ingress: the routes of a server, for several models with several replicas each."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, FastAPI
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.config import EngineConfig, ServerConfig
from serve import openapi
from serve.app import bare_app, make_context, make_middleware, model_app
from serve.body import json_answer
from serve.context import ServerContext, package_version, served_names
from serve.errors import APIError, as_api_error
from serve.protocol.models import Health, Load, Model, ModelList, ResetCache
from serve.replicas.client import ReplicasClient
from serve.replicas.config import check_names
from serve.replicas.metrics import IngressMetrics, ReplicasMetrics


@dataclass(frozen=True)
class ServedModel:
    config: EngineConfig
    client: ReplicasClient


def create_ingress(models: Sequence[ServedModel], server: ServerConfig, name: str) -> FastAPI:
    """Requests go to the model that their body names; those that name none, to the first.

    Args:
        server: address, keys and limits of the ingress.
        name: of the ingress, for its metrics.
    """
    check_names([served_names(model.config) for model in models])
    contexts, metrics = [], []
    for model in models:
        own = ReplicasMetrics(model.client, model.config, served_names(model.config)[0], name)
        contexts.append(make_context(model.client, model.config, own))
        metrics.append(own)
    apps = [model_app(context) for context in contexts]
    openapi.install(apps[0], package_version())
    shown = IngressMetrics(metrics, name)
    ingress = bare_app(lambda error: as_api_error(error, server.retry_after), make_middleware(shown, server))
    ingress.openapi = apps[0].openapi  # type: ignore[method-assign]  # all models have the same routes
    ingress.include_router(_router(contexts, [model.client for model in models], shown))
    by_name = {n: app for context, app in zip(contexts, apps) for n in context.model_names}
    ingress.router.default = ByModel(by_name, apps[0])
    return ingress


def _router(
    contexts: Sequence[ServerContext], clients: Sequence[ReplicasClient], metrics: IngressMetrics
) -> APIRouter:
    """What concerns all models. Their own routes of these addresses are hidden behind these."""
    routes = APIRouter()
    by_name = {name: context for context in contexts for name in context.model_names}

    def describe(name: str) -> Model:
        context = by_name[name]
        return Model(name, context.started, context.model_names[0], context.client.limits.max_model_len)

    async def refresh() -> None:
        await asyncio.gather(*(client.refresh() for client in clients))

    @routes.get("/v1/models")
    async def models() -> Response:
        return json_answer(ModelList([describe(name) for name in by_name]))

    @routes.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        if model not in by_name:
            raise unknown_model(model, by_name)
        return json_answer(describe(model))

    @routes.head("/health")
    @routes.get("/health")
    async def health() -> Response:
        """The ingress works; replicas that do not are replaced."""
        return json_answer(Health("ok"))

    @routes.head("/ready")
    @routes.get("/ready")
    async def ready() -> Response:
        await refresh()
        for context, client in zip(contexts, clients):
            client.check_ready()
            if not any(report.healthy for report in client.reports.values()):
                raise APIError(503, f"no requests are taken: {context.model_names[0]} has no replica")
        return json_answer(Health("ok"))

    @routes.get("/load")
    async def load() -> Response:
        await refresh()
        found = [client.snapshot() for client in clients]
        running, waiting = sum(s.running for s in found), sum(s.waiting for s in found)
        usage = sum(s.used_blocks for s in found) / max(sum(s.num_blocks for s in found), 1)
        return json_answer(
            Load(running + waiting, running, waiting, sum(s.waiting_tokens for s in found), usage)
        )

    @routes.get("/metrics")
    async def show_metrics() -> Response:
        await refresh()
        return Response(metrics.expose(), headers={"Content-Type": metrics.content_type})

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        try:
            blocks = [await client.reset_prefix_cache() for client in clients]
        except TimeoutError as error:
            raise APIError(503, f"not all prefix caches were reset: {error}") from None
        return json_answer(ResetCache(sum(blocks)))

    return routes


def unknown_model(name: str, known: Mapping[str, object]) -> APIError:
    return APIError(
        404, f"the model {name[:200]!r} does not exist; this server has: {', '.join(known)}", "model"
    )


class _Named(msgspec.Struct):
    """Of a body, what is needed to pass it on."""

    model: str | None = None


class ByModel:
    """Passes calls on to the application of the model that they name.

    Args:
        apps: by served name.
        first: for calls without a name, and bodies that cannot be read: that application says what is wrong.
    """

    def __init__(self, apps: Mapping[str, ASGIApp], first: ASGIApp) -> None:
        self._apps = apps
        self._first = first
        self._single = all(app is first for app in apps.values())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._single or scope["type"] != "http" or scope["method"] != "POST":
            await self._first(scope, receive, send)
            return
        body = await _read(receive)
        await self._choose(body)(scope, _replayed(body, receive), send)

    def _choose(self, body: bytes) -> ASGIApp:
        try:
            name = msgspec.json.decode(body, type=_Named).model
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._first
        if name is None:
            return self._first
        if name not in self._apps:
            raise unknown_model(name, self._apps)
        return self._apps[name]


async def _read(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body again, and then whatever comes."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
