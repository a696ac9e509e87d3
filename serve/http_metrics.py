"""Metrics of HTTP calls."""

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from serve.call_metrics import Histogram

PREFIX = "jaxinfer:"

_HTTP = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class HttpMetrics:
    """HTTP calls that were answered.

    Args:
        labels: of all its numbers, with their values.
    """

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        self._labels = dict(labels or {})
        self._answers: Counter[tuple[str, str, str]] = Counter()
        self._times: dict[tuple[str, str], Histogram] = {}

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        self._answers[method, route, str(status)] += 1
        times = self._times.get((method, route))
        if times is None:
            times = self._times[method, route] = Histogram(_HTTP)
        times.observe(seconds)

    def families(self) -> Iterator[Metric]:
        names, values = tuple(self._labels), tuple(self._labels.values())
        answers = CounterMetricFamily(
            f"{PREFIX}http_requests", "HTTP calls answered.", labels=(*names, "method", "route", "status")
        )
        for key, count in self._answers.items():
            answers.add_metric((*values, *key), count)
        yield answers
        times = HistogramMetricFamily(
            f"{PREFIX}http_request_duration_seconds",
            "Seconds from an HTTP call to the end of its answer.",
            labels=(*names, "method", "route"),
        )
        for route, histogram in self._times.items():
            histogram.fill(times, (*values, *route))
        yield times
