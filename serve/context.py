"""What every router of the server works with."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath
from typing import Protocol

from jaxinfer.config import EngineConfig
from jaxinfer.engine.client import EngineClient
from serve.dashboard.latency import LatencyWindow
from serve.errors import APIError, as_api_error
from serve.observers import CallObserver, Observers


class Metrics(CallObserver, Protocol):
    """Counts calls (as a ``CallObserver``) and HTTP answers, and shows them with the engine's numbers."""

    @property
    def content_type(self) -> str:
        """Of what ``expose`` returns."""
        ...

    def expose(self) -> bytes:
        """The Prometheus text of the moment; gauges come from ``client.snapshot()``."""
        ...

    def http_answer(self, method: str, route: str, status: int, seconds: float) -> None:
        """One answered HTTP call; ``route`` is the path's pattern, so the number of label values is bounded."""
        ...


@dataclass(frozen=True)
class ServerContext:
    """Attributes:
    client: the engine.
    metrics: for ``/metrics`` and the HTTP middleware; it is one of the observers too.
    observers: told about every generating call.
    latency: the latencies of the last seconds, for the dashboard; one of the observers.
    model_names: names that requests may use; the first one is shown.
    started: unix time.
    """

    client: EngineClient
    config: EngineConfig
    metrics: Metrics
    observers: Observers
    latency: LatencyWindow
    model_names: tuple[str, ...]
    started: int

    def to_error(self, error: Exception) -> APIError:
        """The answer that an exception stands for."""
        return as_api_error(error, self.config.server.retry_after)


def served_names(config: EngineConfig) -> tuple[str, ...]:
    """The configured names, or one made from the reference: ``hf:org/name`` is ``org/name``, a path its last part."""
    if config.server.served_model_names:
        return config.server.served_model_names
    reference = config.model.reference
    if reference.startswith("hf:"):
        return (reference.removeprefix("hf:"),)
    name = PurePath(reference.removeprefix("package:")).name
    return (name or reference,)


def package_version() -> str:
    """Version of the installed package; "0" where it runs from a checkout that is not installed."""
    try:
        return version("jaxinfer")
    except PackageNotFoundError:
        return "0"
