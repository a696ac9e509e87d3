"""``/metrics`` of an ingress: all replicas of all models, and the calls that went through this ingress."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from jaxinfer.config import EngineConfig
from serve.call_metrics import CallTimes
from serve.http_metrics import HttpMetrics
from serve.metrics import EngineState, ModelMetrics
from serve.observers import Call
from serve.replicas.client import ReplicasClient


class ReplicasMetrics:
    """Numbers of one model; a ``serve.context.Metrics`` of its routes. What is exposed, and what calls are answered, is
    the business of ``IngressMetrics``.

    The label ``engine`` is the replica, or the ingress where the numbers are of calls.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, client: ReplicasClient, config: EngineConfig, model: str, ingress: str) -> None:
        self._client = client
        self._model = ModelMetrics(config, client.limits.max_model_len, model, self._engines, ingress)

    def started(self, call: Call) -> CallTimes:
        return self._model.started(call)

    def families(self) -> Iterator[Metric]:
        return self._model.families()

    def expose(self) -> bytes:
        return b""

    def http_answer(self, method: str, route: str, status: int, seconds: float) -> None:
        """Counted by the ingress."""

    def _engines(self) -> Mapping[str, EngineState]:
        return {
            name: EngineState(report.snapshot, report.healthy)
            for name, report in self._client.reports.items()
        }


class IngressMetrics(Collector):
    """Everything behind ``/metrics``; a ``serve.context.Metrics`` of the middleware.

    Numbers of calls differ from ingress to ingress, and have its name as label (``engine``, or ``ingress`` where they
    are of HTTP), so a scraper may be answered by any of them.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, models: Sequence[ReplicasMetrics], ingress: str) -> None:
        self._models = models
        self._http = HttpMetrics({"ingress": ingress})
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def started(self, call: Call) -> CallTimes:
        raise AssertionError("calls belong to a model")

    def http_answer(self, method: str, route: str, status: int, seconds: float) -> None:
        self._http.answered(method, route, status, seconds)

    def expose(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are not known before the first scrape."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model in self._models:
            for family in model.families():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from families.values()
        yield from self._http.families()
