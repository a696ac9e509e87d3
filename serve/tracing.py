"""OpenTelemetry spans: one for each call of a generating endpoint. Needs the extra ``otel``; imported only when
``server.otlp_endpoint`` is set.

Attributes follow the GenAI semantic conventions (https://opentelemetry.io/docs/specs/semconv/gen-ai/); what they have
no name for is named ``gen_ai.latency.*`` as vLLM does. Sampling and batching follow the SDK's ``OTEL_*`` variables.
"""

import time
from collections.abc import Mapping, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from jaxinfer.engine.client import EngineRequest
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.outputs import RequestMetrics
from serve.observers import Call


class CallTracer:
    """A ``CallObserver`` that makes a span of each call; a ``traceparent`` header is continued."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def exporting(cls, endpoint: str, version: str) -> "CallTracer":
        """Sends spans in batches, from a thread of the SDK's, which is flushed when the process exits.

        Args:
            endpoint: OTLP over HTTP, in full, for example ``http://collector:4318/v1/traces``.

        Raises:
            ImportError: the extra is not installed.
        """
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        provider = TracerProvider(
            resource=Resource.create({"service.name": "jaxinfer", "service.version": version})
        )
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider.get_tracer("jaxinfer", version))

    def started(self, call: Call) -> "_CallSpan":
        span = self._tracer.start_span(
            f"{call.operation} {call.model}",
            context=self._propagator.extract(call.headers),
            kind=SpanKind.SERVER,
            attributes=_request_attributes(call),
            start_time=_wall_nanoseconds(call.received),
        )
        return _CallSpan(span, call)


class _CallSpan:
    """Follows one call to the end of its span."""

    def __init__(self, span: Span, call: Call) -> None:
        self._span = span
        self._received = call.received
        self._first_token: float | None = None
        self._output_tokens = 0
        self._cached: dict[str, int] = {}
        self._queue_time: float | None = None
        self._preemptions = 0
        self._reasons: dict[tuple[str, int], str] = {
            (request.request_id, index): "abort"
            for request in call.requests
            for index in range(_choices(request))
        }
        """Choices that get no last delta were left by the client."""

    def news(self, deltas: Sequence[OutputDelta]) -> None:
        for delta in deltas:
            if delta.token_ids:
                self._output_tokens += len(delta.token_ids)
                if self._first_token is None:
                    self._first_token = time.monotonic()
            if delta.finish_reason is not None:
                self._reasons[delta.request_id, delta.index] = delta.finish_reason.value
                self._cached[delta.request_id] = max(
                    delta.num_cached_tokens, self._cached.get(delta.request_id, 0)
                )
            if delta.metrics is not None:
                self._add_metrics(delta.metrics)

    def ended(self, error: str | None = None) -> None:
        attributes: dict[str, AttributeValue] = {
            "gen_ai.response.finish_reasons": list(self._reasons.values()),
            "gen_ai.usage.output_tokens": self._output_tokens,
            "gen_ai.usage.cache_read.input_tokens": sum(self._cached.values()),
            "gen_ai.latency.e2e": time.monotonic() - self._received,
            "jaxinfer.preemptions": self._preemptions,
        }
        if self._first_token is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = self._first_token - self._received
        if self._queue_time is not None:
            attributes["gen_ai.latency.time_in_queue"] = self._queue_time
        if error is not None:
            attributes["error.type"] = "_OTHER"
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.set_attributes(attributes)
        self._span.end()

    def _add_metrics(self, metrics: RequestMetrics) -> None:
        """The queue time is that of the choice that waited longest."""
        self._preemptions += metrics.num_preemptions
        if metrics.first_scheduled_time is not None:
            waited = metrics.first_scheduled_time - metrics.arrival_time
            self._queue_time = max(waited, self._queue_time or 0.0)


def _choices(request: EngineRequest) -> int:
    return 1 if request.pooling is not None else request.params.n


def _request_attributes(call: Call) -> Mapping[str, AttributeValue]:
    params = call.requests[0].params
    attributes: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": call.operation,
        "gen_ai.provider.name": "jaxinfer",
        "gen_ai.request.model": call.model,
        "gen_ai.response.model": call.model,
        "gen_ai.response.id": call.call_id,
        "gen_ai.usage.input_tokens": sum(len(request.prompt_token_ids) for request in call.requests),
    }
    if call.operation != "embeddings":
        attributes |= {
            "gen_ai.request.stream": call.stream,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.stop_sequences": list(params.stop) or None,
        }
    return {name: value for name, value in attributes.items() if value is not None}


def _wall_nanoseconds(monotonic: float) -> int:
    """Unix time of a moment on the clock of ``time.monotonic``."""
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)
