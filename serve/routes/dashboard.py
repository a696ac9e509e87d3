"""``/dashboard``: a page for people, and the data that it polls."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated

import msgspec
from fastapi import APIRouter, FastAPI, Query
from fastapi.responses import HTMLResponse, Response

from serve.context import ServerContext
from serve.dashboard.history import History
from serve.dashboard.page import load_page
from serve.dashboard.source import DashboardSource
from serve.openapi import errors


def router(context: ServerContext) -> APIRouter:
    """The page is public; its data is for holders of an API key, as ``/v1`` is (see the middleware)."""
    history = History(context.client.snapshot, context.latency)
    source = DashboardSource(context.client, history, context.model_names[0], context.started)
    page = load_page()

    @asynccontextmanager
    async def sampling(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(history.run(), name="dashboard-history")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    routes = APIRouter(lifespan=sampling)

    @routes.get("/dashboard", response_class=HTMLResponse, summary="The dashboard page")
    async def dashboard() -> HTMLResponse:
        return HTMLResponse(
            page.html, headers={"Content-Security-Policy": page.policy, "Cache-Control": "no-cache"}
        )

    @routes.get("/dashboard/data", summary="What the dashboard shows", responses=errors(400, 401))
    async def data(since: Annotated[int, Query(ge=0)] = 0) -> Response:
        """The state of the engine, with the history samples from number ``since`` on."""
        body = msgspec.json.encode(await source.state(since))
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})

    return routes
