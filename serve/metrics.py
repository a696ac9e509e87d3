"""Prometheus metrics: the engine's numbers as they are when somebody scrapes, and what calls went through.

Counters of requests and tokens come from the engine alone, which has one bookkeeping for every way to finish, so they
cannot differ from what it did. Latencies are what a client sees: from the arrival of its call to the tokens that are
taken for it. They are observed through ``CallObserver``, for every call that was admitted.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from jaxinfer.config import EngineConfig
from jaxinfer.engine.client import EngineClient, EngineDeadError
from jaxinfer.observability.snapshot import STEP_TOKENS, EngineSnapshot
from serve.call_metrics import CallMetrics, CallTimes, add_buckets
from serve.http_metrics import PREFIX, HttpMetrics
from serve.observers import Call

VLLM_PREFIX = "vllm:"
LABELS = ("model_name", "engine")
ENGINE = "0"
"""Value of the label ``engine`` where there is one."""

_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")

_NOT_IN_VLLM = frozenset(
    (
        "num_requests_waiting_tokens",
        "steps",
        "step_host_seconds",
        "step_device_seconds",
        "compilations",
        "computed_tokens",
        "padded_tokens",
        "requests_admitted",
        "request_aborts",
        "request_errors",
        "engine_healthy",
        "num_requests_fetching",
        "kv_sent_bytes",
        "kv_received_bytes",
        "kv_sent_blocks",
        "kv_received_blocks",
        "kv_fetches",
        "kv_fetch_failures",
        "kv_fetch_seconds",
        "kv_jobs",
        "kv_job_failures",
        "spec_decode_lossy",
        "expert_tokens",
        "expert_peak_tokens",
    )
)


@dataclass(frozen=True)
class EngineState:
    """Numbers of one engine, and whether it works."""

    snapshot: EngineSnapshot
    healthy: bool


class ModelMetrics:
    """Numbers of one model: of its engines, and of the calls that went through this server.

    Args:
        model: value of the label ``model_name``.
        engines: the newest state of each engine, by the value of its label ``engine``.
        server: value of that label where the numbers are of calls, which this server measures.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        model: str,
        engines: Callable[[], Mapping[str, EngineState]],
        server: str,
    ) -> None:
        self._config = config
        self._model = model
        self._engines = engines
        self._server = server
        self._prefixes = (PREFIX, VLLM_PREFIX) if config.server.vllm_metrics else (PREFIX,)
        self._calls = CallMetrics(max_model_len)

    def started(self, call: Call) -> CallTimes:
        return CallTimes(self._calls, call)

    def families(self) -> Iterator[Metric]:
        """One family may come several times, with other labels."""
        states = self._engines()
        for prefix in self._prefixes:
            for family in self._families(states, prefix):
                if prefix == PREFIX or family.name.removeprefix(prefix) not in _NOT_IN_VLLM:
                    yield family

    def _families(self, states: Mapping[str, EngineState], prefix: str) -> Iterator[Metric]:
        for engine, state in states.items():
            yield from EngineFamilies(self._config, (self._model, engine), state).all(prefix)
        for name, histogram in self._calls.by_name.items():
            family = HistogramMetricFamily(prefix + name, _HELP[name], labels=LABELS)
            histogram.fill(family, (self._model, self._server))
            yield family


class EngineFamilies:
    """What one engine tells."""

    def __init__(self, config: EngineConfig, labels: tuple[str, str], state: EngineState) -> None:
        self._config = config
        self._labels = labels
        self._state = state

    def all(self, prefix: str) -> Iterator[Metric]:
        snapshot = self._state.snapshot
        yield from self._gauges(snapshot, prefix)
        yield from self._counters(snapshot, prefix)
        steps = HistogramMetricFamily(f"{prefix}iteration_tokens_total", "Tokens of a step.", labels=LABELS)
        add_buckets(steps, self._labels, STEP_TOKENS, snapshot.steps_by_tokens, snapshot.computed_tokens)
        yield steps

    def _gauges(self, snapshot: EngineSnapshot, prefix: str) -> Iterator[Metric]:
        values = {
            "num_requests_running": snapshot.running,
            "num_requests_waiting": snapshot.waiting,
            "num_requests_fetching": snapshot.fetching,
            "num_requests_waiting_tokens": snapshot.waiting_tokens,
            "kv_cache_usage_perc": snapshot.used_blocks / max(snapshot.num_blocks, 1),
            "engine_healthy": self._state.healthy,
            "spec_decode_lossy": self._config.speculative.acceptance != "exact",
        }
        for name, value in values.items():
            family = GaugeMetricFamily(prefix + name, _HELP[name], labels=LABELS)
            family.add_metric(self._labels, value)
            yield family
        facts = {
            "block_size": str(self._config.cache.block_size),
            "num_gpu_blocks": str(snapshot.num_blocks),
            "cache_dtype": self._config.cache.dtype,
            "enable_prefix_caching": str(self._config.cache.prefix_caching),
        }
        info = GaugeMetricFamily(
            f"{prefix}cache_config_info", _HELP["cache_config_info"], labels=(*LABELS, *facts)
        )
        info.add_metric((*self._labels, *facts.values()), 1)
        yield info

    def _counters(self, snapshot: EngineSnapshot, prefix: str) -> Iterator[Metric]:
        finished = snapshot.requests_finished
        values = {
            "prefix_cache_queries": snapshot.prefix_query_tokens,
            "prefix_cache_hits": snapshot.prefix_hit_tokens,
            "num_preemptions": snapshot.preemptions,
            "spec_decode_num_drafts": snapshot.drafts,
            "spec_decode_num_draft_tokens": snapshot.drafted_tokens,
            "spec_decode_num_accepted_tokens": snapshot.accepted_tokens,
            "prompt_tokens": snapshot.prompt_tokens,
            "generation_tokens": snapshot.generated_tokens,
            "computed_tokens": snapshot.computed_tokens,
            "padded_tokens": snapshot.padded_tokens,
            "requests_admitted": snapshot.requests_admitted,
            "admission_rejections": snapshot.admission_rejections,
            "request_aborts": finished.get("abort", 0),
            "request_errors": finished.get("error", 0),
            "steps": snapshot.steps_total,
            "step_host_seconds": snapshot.step_host_seconds,
            "step_device_seconds": snapshot.step_device_seconds,
            "compilations": snapshot.compilations,
            "kv_sent_bytes": snapshot.transfers.sent_bytes,
            "kv_received_bytes": snapshot.transfers.received_bytes,
            "kv_sent_blocks": snapshot.transfers.sent_blocks,
            "kv_received_blocks": snapshot.transfers.received_blocks,
            "kv_fetches": snapshot.transfers.fetches,
            "kv_fetch_failures": snapshot.transfers.fetches_failed,
            "kv_fetch_seconds": snapshot.transfers.fetch_seconds,
            "kv_jobs": snapshot.transfers.jobs,
            "kv_job_failures": snapshot.transfers.jobs_failed,
        }
        for name, value in values.items():
            family = CounterMetricFamily(prefix + name, _HELP[name], labels=LABELS)
            family.add_metric(self._labels, value)
            yield family
        success = CounterMetricFamily(
            f"{prefix}request_success", _HELP["request_success"], labels=(*LABELS, "finished_reason")
        )
        for reason in _FINISH_REASONS:
            success.add_metric((*self._labels, reason), finished.get(reason, 0))
        yield success
        name = "spec_decode_num_accepted_tokens_per_pos"
        accepted = CounterMetricFamily(prefix + name, _HELP[name], labels=(*LABELS, "position"))
        for position, count in enumerate(snapshot.accepted_by_depth or (0,)):
            accepted.add_metric((*self._labels, str(position)), count)
        yield accepted
        if snapshot.expert_tokens:
            yield from self._experts(snapshot, prefix)

    def _experts(self, snapshot: EngineSnapshot, prefix: str) -> Iterator[Metric]:
        """One series per expert and one per layer: a series for each expert of each layer would be thousands."""
        for name, label, values in (
            ("expert_tokens", "expert", enumerate(snapshot.expert_tokens)),
            ("expert_peak_tokens", "layer", snapshot.expert_peak_tokens.items()),
        ):
            family = CounterMetricFamily(prefix + name, _HELP[name], labels=(*LABELS, label))
            for number, rows in values:
                family.add_metric((*self._labels, str(number)), rows)
            yield family


class ServerMetrics(Collector):
    """Everything behind ``/metrics`` of a server with one engine, in a registry of its own; see
    ``serve.context.Metrics``.

    Args:
        model: value of the label ``model_name``.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, client: EngineClient, config: EngineConfig, model: str) -> None:
        self._client = client
        self._model = ModelMetrics(config, client.limits.max_model_len, model, self._engines, ENGINE)
        self._http = HttpMetrics()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def started(self, call: Call) -> CallTimes:
        return self._model.started(call)

    def http_answer(self, method: str, route: str, status: int, seconds: float) -> None:
        self._http.answered(method, route, status, seconds)

    def expose(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are not known before the first scrape."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._model.families()
        yield from self._http.families()

    def _engines(self) -> Mapping[str, EngineState]:
        return {ENGINE: EngineState(self._client.snapshot(), self._healthy())}

    def _healthy(self) -> bool:
        try:
            self._client.check_health()
        except EngineDeadError:
            return False
        return True


_HELP = {
    "num_requests_running": "Sequences that run.",
    "num_requests_waiting": "Sequences that wait.",
    "num_requests_fetching": "Sequences whose blocks another engine computes; they count as waiting.",
    "num_requests_waiting_tokens": "Prompt tokens of sequences that wait.",
    "kv_cache_usage_perc": "Share of the KV blocks that sequences hold, 0 to 1; blocks that are only cached are free.",
    "engine_healthy": "1 while the engine works.",
    "spec_decode_lossy": "1 if drafts are accepted by a rule that changes the law of the output.",
    "cache_config_info": "The KV cache's configuration.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens that the prefix cache had.",
    "num_preemptions": "Sequences that lost their blocks and were computed again.",
    "spec_decode_num_drafts": "Drafts of sequences that were verified.",
    "spec_decode_num_draft_tokens": "Tokens of those drafts.",
    "spec_decode_num_accepted_tokens": "Those of them that were accepted.",
    "spec_decode_num_accepted_tokens_per_pos": "Accepted tokens by their place in the draft, from 0.",
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "generation_tokens": "Tokens generated.",
    "computed_tokens": "Tokens computed, prompts and recomputation included.",
    "padded_tokens": "Padding computed with them.",
    "requests_admitted": "Requests queued; each is counted once in request_success when it ends.",
    "admission_rejections": "Requests refused because the queue was full.",
    "request_aborts": "Requests that ended because the client left, or the server stopped.",
    "request_errors": "Requests that failed.",
    "request_success": "Requests ended, by the finish reason of the choice that ended last.",
    "steps": "Steps of the engine.",
    "step_host_seconds": "Time of the host in steps: schedule, build, dispatch, commit.",
    "step_device_seconds": "Time of the device in steps, as far as the host can see.",
    "kv_sent_bytes": "Bytes of KV blocks sent to other engines.",
    "kv_received_bytes": "Bytes of KV blocks that came from other engines.",
    "kv_sent_blocks": "KV blocks sent to other engines, each with all layers of its group.",
    "kv_received_blocks": "KV blocks that came from other engines.",
    "kv_fetches": "Prompts that other engines were asked for.",
    "kv_fetch_failures": "Prompts that other engines were asked for and that were computed here after all.",
    "kv_fetch_seconds": "Time from asking for the blocks of a prompt to the end, of all that ended.",
    "kv_jobs": "Prompts that other engines asked for.",
    "kv_job_failures": "Prompts that other engines asked for and that failed, or that nobody wanted any more.",
    "expert_tokens": "Tokens that experts got, once for each sparse layer, by the number of the expert.",
    "expert_peak_tokens": "Tokens of the busiest expert of each step, added up, by layer.",
    "compilations": "Programs compiled after warm-up; there should be none.",
    "time_to_first_token_seconds": "From the arrival of a call to the first token of a request.",
    "inter_token_latency_seconds": "Between two tokens of a choice.",
    "request_time_per_output_token_seconds": "Mean time per token of a choice after its first one.",
    "e2e_request_latency_seconds": "From the arrival of a call to the end of a request.",
    "request_queue_time_seconds": "From the admission of a request to its first step.",
    "request_inference_time_seconds": "From the first step of a request to its end.",
    "request_prefill_time_seconds": "From the first step of a request to its first token.",
    "request_decode_time_seconds": "From the first token of a request to its end.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Output tokens of a request, of all its choices.",
    "request_params_n": "Choices that requests ask for.",
    "request_params_max_tokens": "max_tokens of requests that give it.",
}
