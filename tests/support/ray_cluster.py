"""A small local Ray cluster, and calls of what it serves. Imported only where Ray is installed."""

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import ray
from ray import serve

from benchmarks.server_child import free_port
from serve.replicas.config import ReplicasConfig
from serve.replicas.ray_app import NAME, application
from serve.run import EngineSource

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    # Tests run on busy machines, where a process may take long to start.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    "RAY_worker_register_timeout_seconds": "300",
    "JAX_PLATFORMS": "cpu",
}
TIMEOUT = 300.0


@dataclass(frozen=True)
class Cluster:
    url: str

    def deploy(self, config: dict[str, Any], source: EngineSource | None = None) -> None:
        """Starts the application, or updates it; returns when it runs."""
        serve.run(application(ReplicasConfig.of(config), source), name=NAME, route_prefix="/")

    def remove(self) -> None:
        serve.delete(NAME)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=TIMEOUT)

    def metric(self, name: str, model: str) -> dict[str, float]:
        """Values by replica."""
        pattern = rf'^jaxinfer:{name}{{engine="([^"]+)",model_name="{model}"}} (\S+)$'
        return {
            engine: float(v) for engine, v in re.findall(pattern, self.get("/metrics").text, re.MULTILINE)
        }

    def kill(self, model: str, replica: str) -> None:
        """As a node that is lost does: the process gets no time to end."""
        actor = ray.get_actor(f"SERVE_REPLICA::{NAME}#{model}#{replica}", namespace="serve")
        ray.kill(actor, no_restart=False)


@contextmanager
def cluster(num_cpus: int = 4) -> Iterator[Cluster]:
    before = {name: os.environ.get(name) for name in (*ENVIRONMENT, "PYTHONPATH")}
    os.environ.update(ENVIRONMENT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), before["PYTHONPATH"]]))
    port = free_port()
    try:
        _start(num_cpus)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield Cluster(f"http://127.0.0.1:{port}")
    finally:
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _start(num_cpus: int, attempts: int = 6) -> None:
    """Ray gives its processes 30 s to start, and no setting; a busy machine may need another try."""
    for attempt in range(1, attempts + 1):
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=80 * 1024 * 1024,
                log_to_driver=False,
                _node_ip_address="127.0.0.1",
            )
        except Exception as error:
            ray.shutdown()
            if attempt == attempts or "timed out during startup" not in str(error):
                raise
        else:
            return


@dataclass
class Streamed:
    """What a client saw of one stream.

    Attributes:
        error: of the HTTP answer, of the stream, or of the connection.
        done: the stream ended as streams end.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    done: bool = False

    @property
    def whole(self) -> bool:
        return self.done and self.error is None and self.finish_reason is not None


async def stream(client: httpx.AsyncClient, body: dict[str, Any], into: Streamed) -> Streamed:
    """Streams a completion; ``into`` grows while it comes."""
    body = {"stream": True, "return_token_ids": True, "temperature": 0, "ignore_eos": True, **body}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                into.error = f"{answer.status_code}: {(await answer.aread()).decode()[:500]}"
                return into
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    into.done = True
                elif line.startswith("data: "):
                    _note(json.loads(line.removeprefix("data: ")), into)
    except httpx.HTTPError as error:
        into.error = f"{type(error).__name__}: {error}"
    return into


def _note(event: dict[str, Any], into: Streamed) -> None:
    if "error" in event:
        into.error = event["error"]["message"]
    for choice in event.get("choices", ()):
        into.token_ids += choice.get("token_ids") or []
        into.finish_reason = choice["finish_reason"] or into.finish_reason


def http(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits)


def until(condition: Callable[[], bool], seconds: float = TIMEOUT) -> float:
    """Waits; returns the seconds that it took."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            raise AssertionError(f"it did not come to that within {seconds:g} s")
        time.sleep(0.2)
    return time.monotonic() - start


async def eventually(condition: Callable[[], bool], seconds: float = TIMEOUT) -> None:
    """As ``until``, beside other tasks."""
    await asyncio.to_thread(until, condition, seconds)
