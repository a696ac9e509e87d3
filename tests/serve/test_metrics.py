"""``/metrics`` through HTTP: values against what was done, names, and that counters never fall (OPS-04)."""

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.config import EngineConfig
from jaxinfer.observability.snapshot import EngineSnapshot
from serve.metrics import EngineFamilies, EngineState
from tests.support import engines
from tests.support.engines import one_hot, scripted, simulated
from tests.support.scripts import say, slow
from tests.support.servers import Server, running_server
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("metrics")

TEXT = tuple(b"abcdefghij" * 40)


def scrape(server: Server) -> dict[tuple[str, str], float]:
    """Samples by name and by their distinguishing label."""
    response = server.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    values = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            values[sample.name, ",".join(labels.values())] = sample.value
    return values


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def complete(server: Server, prompt: str = "hi", **values: Any) -> httpx.Response:
    return server.client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **values})


def open_stream(server: Server, gate: threading.Event, tokens: int = 400) -> threading.Thread:
    """Reads the first event, waits for the gate, and leaves."""

    def run() -> None:
        body = {"prompt": "hi", "temperature": 0, "max_tokens": tokens, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
            gate.wait(20)
            assert response.status_code == 200

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def build(settings: EngineConfig, script: Any) -> Any:
    return scripted(script, settings, tokenizer=ByteTokenizer(), max_model_len=500)


def failing(script: Any) -> Any:
    def run(asked, index, position):
        row = script(asked, index, position)
        return row * float("nan") if bytes(asked.prompt_token_ids[:4]) == b"fail" else row

    return run


def test_ops_04_metrics_add_up():
    """5 normal requests, 5 that are left while they decode, 2 while they wait, 1 refused with 400, 1 that fails.

    Prompt tokens are counted at admission, in the counter and in the histogram, aborted requests included; so they
    agree. What a client that left did not take is in the counter of generated tokens only."""
    settings = engines.config(max_num_seqs=6, num_blocks=800)
    with running_server(build(settings, slow(failing(say(TEXT)), 0.001))) as server:
        before = scrape(server)
        for _ in range(5):
            assert complete(server, max_tokens=5).status_code == 200
        gate = threading.Event()
        streams = [open_stream(server, gate) for _ in range(6)]
        until(lambda: scrape(server)["jaxinfer:num_requests_running", ""] == 6)
        streams += [open_stream(server, gate) for _ in range(2)]
        until(lambda: scrape(server)["jaxinfer:num_requests_waiting", ""] == 2)
        busy = scrape(server)
        assert busy["jaxinfer:kv_cache_usage_perc", ""] > 0
        gate.set()
        for stream in streams:
            stream.join(20)
        assert complete(server, max_tokens=-1).status_code == 400
        assert complete(server, prompt="fail", max_tokens=3).status_code == 500
        until(lambda: scrape(server)["jaxinfer:num_requests_running", ""] == 0)
        after = scrape(server)
        finished = {k[1]: v for k, v in after.items() if k[0] == "jaxinfer:request_success_total"}
        assert finished == {"stop": 0, "length": 5, "abort": 8, "error": 1, "repetition": 0}
        assert after["jaxinfer:requests_admitted_total", ""] == sum(finished.values()) == 14
        assert after["jaxinfer:request_aborts_total", ""] == 8
        assert after["jaxinfer:request_errors_total", ""] == 1
        assert after["jaxinfer:prompt_tokens_total", ""] == 13 * 2 + 4
        assert after["jaxinfer:request_prompt_tokens_sum", ""] == after["jaxinfer:prompt_tokens_total", ""]
        assert after["jaxinfer:request_prompt_tokens_count", ""] == 14
        assert after["jaxinfer:request_generation_tokens_count", ""] == 14
        assert after["jaxinfer:num_requests_waiting", ""] == 0
        assert after["jaxinfer:kv_cache_usage_perc", ""] == 0
        assert after["jaxinfer:http_requests_total", "POST,/v1/completions,400"] == 1
        assert after["jaxinfer:http_requests_total", "POST,/v1/completions,500"] == 1
        for earlier, later in ((before, busy), (busy, after), (after, scrape(server))):
            for key, value in earlier.items():
                if key[0].endswith(("_total", "_count", "_bucket")):
                    assert later[key] >= value, key


def test_ops_04_idle_gauges_are_true_without_a_step():
    """All clients leave and no new one comes: a load balancer must see an idle server."""
    settings = engines.config(max_num_seqs=2, num_blocks=800)
    with running_server(build(settings, slow(say(TEXT), 0.002))) as server:
        gate = threading.Event()
        streams = [open_stream(server, gate) for _ in range(6)]
        until(lambda: scrape(server)["jaxinfer:num_requests_waiting", ""] == 4)
        gate.set()
        for stream in streams:
            stream.join(20)
        time.sleep(0.5)
        idle = scrape(server)
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "num_requests_waiting_tokens",
            "kv_cache_usage_perc",
        ):
            assert idle[f"jaxinfer:{name}", ""] == 0, name


def test_ops_04_overload_is_told_and_counted():
    settings = engines.config(max_num_seqs=1, num_blocks=800, max_waiting_seqs=1)
    with running_server(build(settings, slow(say(TEXT), 0.002)), retry_after=7) as server:
        gate = threading.Event()
        streams = [open_stream(server, gate)]
        until(lambda: scrape(server)["jaxinfer:num_requests_running", ""] == 1)
        streams.append(open_stream(server, gate))
        until(lambda: scrape(server)["jaxinfer:num_requests_waiting", ""] == 1)
        refused = complete(server, max_tokens=1)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "1 sequences are waiting and the limit is 1" in refused.json()["error"]["message"]
        gate.set()
        for stream in streams:
            stream.join(20)
        values = scrape(server)
        assert values["jaxinfer:admission_rejections_total", ""] == 1
        assert values["jaxinfer:requests_admitted_total", ""] == 2


def test_latency_histograms():
    """10 tokens, 4 ms apart: one TTFT, nine gaps, one TPOT; buckets of gaps begin at 0.5 ms."""
    settings = engines.config(num_blocks=800)
    with running_server(build(settings, slow(say(TEXT), 0.004))) as server:
        assert complete(server, max_tokens=10, n=2).status_code == 200
        values = scrape(server)
        count = {
            name: values[f"jaxinfer:{name}_count", ""]
            for name in (
                "time_to_first_token_seconds",
                "inter_token_latency_seconds",
                "request_time_per_output_token_seconds",
                "e2e_request_latency_seconds",
                "request_queue_time_seconds",
                "request_prefill_time_seconds",
                "request_decode_time_seconds",
                "request_inference_time_seconds",
                "request_params_n",
                "request_params_max_tokens",
                "request_generation_tokens",
            )
        }
        assert count == {
            "time_to_first_token_seconds": 1, "inter_token_latency_seconds": 18,
            "request_time_per_output_token_seconds": 2, "e2e_request_latency_seconds": 1,
            "request_queue_time_seconds": 1, "request_prefill_time_seconds": 1, "request_decode_time_seconds": 1,
            "request_inference_time_seconds": 1, "request_params_n": 1, "request_params_max_tokens": 1,
            "request_generation_tokens": 1,
        }  # fmt: skip
        assert values["jaxinfer:request_generation_tokens_sum", ""] == 20
        assert values["jaxinfer:inter_token_latency_seconds_bucket", "0.0005"] <= 18
        assert values["jaxinfer:inter_token_latency_seconds_sum", ""] >= 9 * 0.004
        steps = values["jaxinfer:steps_total", ""]
        assert values["jaxinfer:iteration_tokens_total_count", ""] == steps > 9
        assert values["jaxinfer:step_device_seconds_total", ""] > 0
        assert values["jaxinfer:step_host_seconds_total", ""] > 0


@pytest.mark.parametrize("also", [False, True])
def test_vllm_names_are_there_on_request(also):
    """Names, kinds and labels that dashboards and ``vllm bench serve`` know."""
    settings = engines.config()
    with running_server(simulated(settings, tokenizer=ByteTokenizer()), vllm_metrics=also) as server:
        assert complete(server, max_tokens=3).status_code == 200
        families = {f.name: f for f in text_string_to_metric_families(server.client.get("/metrics").text)}
    ours = {name.removeprefix("jaxinfer:") for name in families if name.startswith("jaxinfer:")}
    theirs = {
        name.removeprefix("vllm:"): families[name].type for name in families if name.startswith("vllm:")
    }
    if not also:
        assert theirs == {}
        return
    assert set(theirs) < ours
    gauges = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"}
    counters = {
        "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens",
        "request_success", "admission_rejections", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
    }  # fmt: skip
    histograms = {
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_params_n", "request_params_max_tokens", "iteration_tokens_total",
    }  # fmt: skip
    expected = {
        **dict.fromkeys(gauges, "gauge"),
        **dict.fromkeys(counters, "counter"),
        **dict.fromkeys(histograms, "histogram"),
    }
    assert theirs == expected
    for name, family in families.items():
        if name.startswith(("vllm:", "jaxinfer:")) and "http" not in name:
            assert all(
                s.labels["engine"] == "0" and s.labels["model_name"] == "test" for s in family.samples
            ), name


def test_tokens_of_experts_have_a_series_per_expert_and_per_layer():
    def samples(snapshot: EngineSnapshot) -> dict[tuple[str, str], float]:
        families = EngineFamilies(engines.config(), ("model", "0"), EngineState(snapshot, True)).all(
            "jaxinfer:"
        )
        return {
            (sample.name, sample.labels.get("expert", "") + sample.labels.get("layer", "")): sample.value
            for family in families
            for sample in family.samples
            if "expert" in sample.name
        }

    assert samples(EngineSnapshot()) == {}
    assert samples(EngineSnapshot(expert_tokens=(5, 0, 7), expert_peak_tokens={1: 4, 3: 6})) == {
        ("jaxinfer:expert_tokens_total", "0"): 5,
        ("jaxinfer:expert_tokens_total", "1"): 0,
        ("jaxinfer:expert_tokens_total", "2"): 7,
        ("jaxinfer:expert_peak_tokens_total", "1"): 4,
        ("jaxinfer:expert_peak_tokens_total", "3"): 6,
    }


def test_two_servers_share_nothing():
    """Each has a registry of its own."""
    with (
        running_server(simulated(tokenizer=ByteTokenizer())) as one,
        running_server(simulated(tokenizer=ByteTokenizer())) as two,
    ):
        assert complete(one, max_tokens=3).status_code == 200
        assert scrape(one)["jaxinfer:requests_admitted_total", ""] == 1
        assert scrape(two)["jaxinfer:requests_admitted_total", ""] == 0


def never_reads(server: Server, body: dict[str, Any]) -> socket.socket:
    """Sends a request through a socket with a small receive buffer."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


def test_ops_01_a_reader_that_never_reads():
    """Real sockets: a client asks for a stream of six choices with 20 log-probabilities and never reads. When the
    kernel's buffers are full (some MB) and 256 tokens wait, its request is aborted; others are served meanwhile."""

    def endless(asked: Any, index: int, position: int) -> Any:
        return one_hot(120)

    settings = engines.config(num_blocks=9100, max_num_seqs=8)
    built = scripted(endless, settings, tokenizer=ByteTokenizer(), max_model_len=6000)
    with running_server(built, max_buffered_tokens=256) as server:
        body = {"prompt": "hi", "stream": True, "max_tokens": 5900, "n": 6, "logprobs": 20}
        assert complete(server, max_tokens=3, logprobs=20, n=6).status_code == 200
        before = scrape(server)
        with never_reads(server, body):
            end = time.monotonic() + 90
            while scrape(server)["jaxinfer:request_aborts_total", ""] == 0:
                assert complete(server, max_tokens=10).status_code == 200
                assert time.monotonic() < end, "the slow reader is still served"
            until(lambda: scrape(server)["jaxinfer:num_requests_running", ""] == 0)
            values = scrape(server)
            assert values["jaxinfer:kv_cache_usage_perc", ""] == 0
            made = (
                values["jaxinfer:generation_tokens_total", ""]
                - before["jaxinfer:generation_tokens_total", ""]
            )
            assert made < 6 * 5900
