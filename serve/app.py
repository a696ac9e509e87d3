"""The HTTP application: routes, middleware and error handlers around an engine client."""

import time
from collections.abc import Callable, Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from jaxinfer.config import EngineConfig, ServerConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.engine.client import EngineClient, EngineDeadError
from jaxinfer.param_checks import InvalidParamsError
from jaxinfer.request import QueueFullError, RequestError
from jaxinfer.tokenization.chat import ChatTemplateError
from serve import openapi
from serve.context import Metrics, ServerContext, package_version, served_names
from serve.dashboard.latency import LatencyWindow
from serve.errors import APIError
from serve.metrics import ServerMetrics
from serve.middleware import CLIENT_LEFT, APIKeys, BodyLimit, RequestIds
from serve.observers import CallObserver, Observers
from serve.routes import (
    admin,
    chat,
    completions,
    dashboard,
    embeddings,
    health,
    models,
    responses,
    tokens,
)
from serve.sse import ClientDisconnectedError

ToError = Callable[[Exception], APIError]

ROUTERS = (
    completions.router,
    chat.router,
    responses.router,
    embeddings.router,
    tokens.router,
    models.router,
    health.router,
    admin.router,
)
"""Each makes the routes of one file from the context."""


def create_app(client: EngineClient, config: EngineConfig) -> FastAPI:
    """The server's application. It neither starts nor stops the engine."""
    context = make_context(client, config)
    app = model_app(context, make_middleware(context.metrics, config.server))
    if config.server.dashboard:
        app.include_router(dashboard.router(context))
    openapi.install(app, package_version())
    return app


def model_app(context: ServerContext, middleware: Sequence[Middleware] = ()) -> FastAPI:
    """All routes of one model."""
    app = bare_app(context.to_error, middleware)
    for router in ROUTERS:
        app.include_router(router(context))
    return app


def bare_app(to_error: ToError, middleware: Sequence[Middleware]) -> FastAPI:
    """No routes; errors are answered as clients know them."""
    app = FastAPI(
        title="jaxinfer",
        version=package_version(),
        docs_url=None,
        redoc_url=None,
        middleware=middleware,
    )
    _handle_errors(app, to_error)
    return app


def make_context(client: EngineClient, config: EngineConfig, metrics: Metrics | None = None) -> ServerContext:
    """Args:
    metrics: those of a server with one engine if absent.
    """
    names = served_names(config)
    metrics = metrics or ServerMetrics(client, config, names[0])
    latency = LatencyWindow()
    observers: list[CallObserver] = [metrics, latency]
    if config.server.otlp_endpoint is not None:
        observers.append(_tracer(config.server.otlp_endpoint))
    return ServerContext(client, config, metrics, Observers(observers), latency, names, int(time.time()))


def _tracer(endpoint: str) -> CallObserver:
    """Raises:
    ConfigError: OpenTelemetry is not installed.
    """
    try:
        from serve.tracing import CallTracer  # an extra: imported only if it is asked for

        return CallTracer.exporting(endpoint, package_version())
    except ImportError as error:
        raise ConfigError(
            f"server.otlp_endpoint needs the extra otel ({error}): pip install 'jaxinfer[otel]'"
        ) from error


def make_middleware(metrics: Metrics, server: ServerConfig) -> list[Middleware]:
    """Outermost first. Preflight requests carry no key, so CORS comes before the keys."""
    stack = [Middleware(RequestIds, metrics=metrics, retry_after=server.retry_after)]
    if server.cors_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(server.cors_origins),
                allow_methods=["GET", "POST", "OPTIONS"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        )
    if server.api_keys:
        stack.append(Middleware(APIKeys, keys=server.api_keys))
    stack.append(Middleware(BodyLimit, max_bytes=server.max_body_bytes))
    return stack


def _handle_errors(app: FastAPI, to_error: ToError) -> None:
    async def refuse(_: Request, error: Exception) -> Response:
        return to_error(error).response()

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path[:200]}"
        message = {404: f"{what}: no such endpoint", 405: f"{what}: this method is not allowed"}
        response = APIError(error.status_code, message.get(error.status_code, str(error.detail))).response()
        response.headers.update(error.headers or {})
        return response

    async def not_valid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = str(first["loc"][-1])
        return APIError(400, f"{field}: {first['msg']}", field).response()

    async def client_left(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_LEFT)

    for kind in (
        APIError,
        RequestError,
        InvalidParamsError,
        ChatTemplateError,
        QueueFullError,
        EngineDeadError,
    ):
        app.add_exception_handler(kind, refuse)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, not_valid)
    for left in (ClientDisconnectedError, ClientDisconnect):  # before its answer, and while it sent its body
        app.add_exception_handler(left, client_left)
