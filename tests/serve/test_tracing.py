"""Spans of calls, as the SDK's in-memory exporter sees them."""

import asyncio
import gzip
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from jaxinfer.config_values import ConfigError
from jaxinfer.engine.build import Engine
from jaxinfer.engine.client import EngineRequest
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.engine.thread_client import ThreadClient
from jaxinfer.outputs import RequestMetrics
from jaxinfer.request import FinishReason
from jaxinfer.sampling_params import SamplingParams
from serve.app import create_app
from serve.observers import Call
from tests.support.engines import scripted, sequence_script
from tests.support.servers import running_server
from tests.support.tokenizers import ByteTokenizer

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed")

from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402
from opentelemetry.trace import SpanKind, StatusCode  # noqa: E402

from serve.tracing import CallTracer  # noqa: E402

pytestmark = pytest.mark.feature("tracing")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter) -> CallTracer:
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return CallTracer(provider.get_tracer("test"))


def call(*requests: EngineRequest, **values) -> Call:
    fields = {"call_id": "chatcmpl-1", "operation": "chat", "model": "tiny", "stream": True, "headers": {}}
    return Call(requests=requests, received=time.monotonic() - 0.5, **{**fields, **values})


def request(name: str = "a", prompt: int = 3, **params) -> EngineRequest:
    return EngineRequest(name, tuple(range(prompt)), SamplingParams(**params))


def last(name: str, index: int, reason: FinishReason, queued: float = 0.25, **values) -> OutputDelta:
    metrics = RequestMetrics(10.0, 10.0 + queued, 10.5, 11.0, num_preemptions=1)
    return OutputDelta(name, index, finish_reason=reason, metrics=metrics, **values)


def test_attributes_follow_the_conventions(tracer, exporter):
    observation = tracer.started(call(request(max_tokens=9, temperature=0.5, seed=-1, stop=["x"], n=2)))
    observation.news([OutputDelta("a", 0, token_ids=(5, 6), text="hi")])
    observation.news(
        [last("a", 0, FinishReason.STOP, 0.1, num_cached_tokens=2), last("a", 1, FinishReason.LENGTH)]
    )
    observation.ended()
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind, span.status.status_code) == ("chat tiny", SpanKind.SERVER, StatusCode.UNSET)
    got = dict(span.attributes)
    assert 0.5 <= got.pop("gen_ai.response.time_to_first_chunk") <= got.pop("gen_ai.latency.e2e") < 5
    assert got.pop("gen_ai.latency.time_in_queue") == pytest.approx(0.25)
    assert got == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "jaxinfer",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.request.stream": True,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": -1,
        "gen_ai.request.stop_sequences": ("x",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "jaxinfer.preemptions": 2,
    }
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(0.5, abs=0.4)


def test_the_callers_trace_is_continued(tracer, exporter):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
    tracer.started(call(request(), headers=headers)).ended()
    tracer.started(call(request(), headers={"traceparent": "nonsense"})).ended()
    known, fresh = exporter.get_finished_spans()
    assert f"{known.context.trace_id:032x}" == TRACE
    assert f"{known.parent.span_id:016x}" == PARENT
    assert known.context.trace_state.get("a") == "b"
    assert fresh.parent is None


def test_a_trace_that_is_not_sampled_is_not_exported(tracer, exporter):
    observation = tracer.started(call(request(), headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}))
    observation.news([last("a", 0, FinishReason.STOP)])
    observation.ended()
    assert exporter.get_finished_spans() == ()


def test_choices_that_the_client_left_are_aborted(tracer, exporter):
    observation = tracer.started(call(request("a"), request("b", prompt=4), operation="text_completion"))
    observation.news([last("a", 0, FinishReason.STOP)])
    observation.ended()
    (span,) = exporter.get_finished_spans()
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop", "abort")
    assert span.attributes["gen_ai.usage.input_tokens"] == 7
    assert "gen_ai.response.time_to_first_chunk" not in span.attributes
    assert span.status.status_code is StatusCode.UNSET


def test_a_failed_call_has_error_status(tracer, exporter):
    observation = tracer.started(call(request()))
    observation.ended("the engine failed")
    (span,) = exporter.get_finished_spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "the engine failed")
    assert span.attributes["error.type"] == "_OTHER"


def test_embeddings_have_no_sampling_attributes(tracer, exporter):
    pooled = EngineRequest("a", (1, 2), SamplingParams(n=1), pooling="mean")
    tracer.started(call(pooled, operation="embeddings")).ended()
    (span,) = exporter.get_finished_spans()
    assert span.name == "embeddings tiny"
    assert not [
        name for name in span.attributes if name.startswith("gen_ai.request.") and name[15:] != "model"
    ]


def test_nothing_is_imported_when_tracing_is_off():
    """Neither our module nor the SDK; FastAPI itself may import the API package if it finds it."""
    names = "[m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'serve.tracing'))]"
    command = [sys.executable, "-c", f"import sys, serve.app; print({names})"]
    output = subprocess.run(command, timeout=120, check=True, capture_output=True, text=True)
    assert output.stdout.strip() == "[]"


# ---- at a server


def test_calls_of_a_server_are_exported():
    """A collector of the test gets spans over OTLP/HTTP, from a stream with a parent and from a call that fails."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter", reason="no OTLP exporter")
    with collector() as (endpoint, bodies), running_server(tiny_engine(), otlp_endpoint=endpoint) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"prompt": "ab", "max_tokens": 4, "stream": True}
        assert server.client.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert server.client.post("/v1/completions", json={"prompt": "ab", "n": 0}).status_code == 400
        for _ in range(100):
            if bodies:
                break
            time.sleep(0.1)
    (sent,) = bodies
    assert bytes.fromhex(TRACE) in sent
    assert bytes.fromhex(PARENT) in sent
    assert b"gen_ai.response.time_to_first_chunk" in sent


def test_a_missing_extra_is_a_configuration_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    engine = tiny_engine()
    server = engine.config.server.model_copy(update={"otlp_endpoint": "http://127.0.0.1:1/v1/traces"})
    client = ThreadClient(engine)
    try:
        with pytest.raises(ConfigError, match=r"server.otlp_endpoint needs the extra otel"):
            create_app(client, engine.config.model_copy(update={"server": server}))
    finally:
        asyncio.run(client.shutdown())


def tiny_engine() -> Engine:
    return scripted(sequence_script([104, 105]), tokenizer=ByteTokenizer())


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An HTTP server that keeps what is posted to it."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/v1/traces", bodies
        http.shutdown()
        thread.join(10)
