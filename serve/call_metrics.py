"""Histograms of calls: latencies as clients see them, sizes, and the engine's times of each request."""

import math
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.outputs import RequestMetrics
from serve.observers import Call

# fmt: off
_TOKEN_GAPS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)
_WHOLE = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
# fmt: on
_CHOICES = (1, 2, 5, 10, 20)


class Histogram:
    """Counts by bucket; an observation costs a search in a tuple."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def fill(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        add_buckets(family, labels, self._bounds, self._counts, self._sum)


def add_buckets(
    family: HistogramMetricFamily,
    labels: Sequence[str],
    bounds: Sequence[float],
    counts: Sequence[int],
    total: float,
) -> None:
    """One labelled histogram from the counts of its buckets, the one above all bounds last."""
    names = [floatToGoString(bound) for bound in (*bounds, math.inf)]
    family.add_metric(labels, list(zip(names, accumulate(counts), strict=True)), total)


class CallMetrics:
    """Histograms of requests and calls.

    An aborted request is in those of prompt tokens, generated tokens (as many as were taken) and its parameters, but
    has no times except that to its first token and between its tokens.
    """

    def __init__(self, max_model_len: int) -> None:
        sizes = _one_two_five(max_model_len)
        self.by_name = {
            "time_to_first_token_seconds": Histogram(_FIRST_TOKEN),
            "inter_token_latency_seconds": Histogram(_TOKEN_GAPS),
            "request_time_per_output_token_seconds": Histogram(_TOKEN_GAPS),
            "e2e_request_latency_seconds": Histogram(_WHOLE),
            "request_queue_time_seconds": Histogram(_WHOLE),
            "request_inference_time_seconds": Histogram(_WHOLE),
            "request_prefill_time_seconds": Histogram(_WHOLE),
            "request_decode_time_seconds": Histogram(_WHOLE),
            "request_prompt_tokens": Histogram(sizes),
            "request_generation_tokens": Histogram(sizes),
            "request_params_n": Histogram(_CHOICES),
            "request_params_max_tokens": Histogram(sizes),
        }
        self.first_token = self.by_name["time_to_first_token_seconds"]
        self.gap = self.by_name["inter_token_latency_seconds"]
        self.per_token = self.by_name["request_time_per_output_token_seconds"]

    def times(self, metrics: RequestMetrics) -> None:
        """The engine's times of a request that finished."""
        scheduled, first, end = metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time
        if scheduled is None or end is None:
            return
        self.by_name["request_queue_time_seconds"].observe(scheduled - metrics.arrival_time)
        self.by_name["request_inference_time_seconds"].observe(end - scheduled)
        if first is not None:
            self.by_name["request_prefill_time_seconds"].observe(first - scheduled)
            self.by_name["request_decode_time_seconds"].observe(end - first)


class _Choice:
    """Times and tokens of one choice."""

    __slots__ = ("first", "last", "tokens")

    def __init__(self, now: float) -> None:
        self.first = self.last = now
        self.tokens = 0


class CallTimes:
    """Follows one call."""

    def __init__(self, metrics: CallMetrics, call: Call) -> None:
        self._metrics = metrics
        self._call = call
        self._choices: dict[tuple[str, int], _Choice] = {}
        self._open = {request.request_id: request.params.n for request in call.requests}
        self._generated = dict.fromkeys(self._open, 0)
        for request in call.requests:
            metrics.by_name["request_params_n"].observe(request.params.n)
            if request.params.max_tokens is not None and request.pooling is None:
                metrics.by_name["request_params_max_tokens"].observe(request.params.max_tokens)

    def news(self, deltas: Sequence[OutputDelta]) -> None:
        now = time.monotonic()
        for delta in deltas:
            count = len(delta.token_ids)
            if count:
                self._note_tokens(delta, count, now)
            if delta.finish_reason is not None:
                self._note_finish(delta, now)

    def ended(self, error: str | None = None) -> None:
        del error
        for request in self._call.requests:
            self._metrics.by_name["request_prompt_tokens"].observe(len(request.prompt_token_ids))
            self._metrics.by_name["request_generation_tokens"].observe(self._generated[request.request_id])

    def _note_tokens(self, delta: OutputDelta, count: int, now: float) -> None:
        metrics, name = self._metrics, delta.request_id
        choice = self._choices.get((name, delta.index))
        if choice is None:
            choice = self._choices[name, delta.index] = _Choice(now)
            if not self._generated[name]:
                metrics.first_token.observe(now - self._call.received)
        else:
            # Tokens that were taken together came one after the other.
            metrics.gap.observe((now - choice.last) / count, count)
        choice.last = now
        choice.tokens += count
        self._generated[name] += count

    def _note_finish(self, delta: OutputDelta, now: float) -> None:
        choice = self._choices.get((delta.request_id, delta.index))
        if choice is not None and choice.tokens > 1:
            self._metrics.per_token.observe((choice.last - choice.first) / (choice.tokens - 1))
        self._open[delta.request_id] -= 1
        if not self._open[delta.request_id]:
            self._metrics.by_name["e2e_request_latency_seconds"].observe(now - self._call.received)
            if delta.metrics is not None:
                self._metrics.times(delta.metrics)


def _one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to a limit."""
    values = [digit * 10**power for power in range(12) for digit in (1, 2, 5)]
    return tuple(value for value in values if value <= max(limit, 1))
