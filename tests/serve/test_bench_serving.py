"""``jaxinfer bench serve`` against a server whose delays are known."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from serve.bench.datasets import Lengths
from serve.bench.options import ArrivalOptions, DatasetOptions, ReportOptions, ServeOptions
from serve.bench.report import Limit
from serve.bench.serving import ServerError, run_serving
from serve.cli import app
from tests.support.fake_openai import FakeOpenAI, Timing, fake_openai

pytestmark = pytest.mark.feature("benchmarks", "http")

VLLM_KEYS = (
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "queue_times",
    "generated_texts",
    "errors",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
)


def _options(url: str, count: int = 8, **changes) -> ServeOptions:
    dataset = DatasetOptions(count=count, lengths=Lengths(5, 4))
    return replace(ServeOptions(url=url, dataset=dataset, warmups=0), **changes)


def _detailed(tmp_path: Path, **changes) -> ReportOptions:
    return ReportOptions(output=tmp_path / "result.json", detailed=True, **changes)


def _run(options: ServeOptions) -> dict:
    run_serving(options)
    assert options.report.output is not None
    return json.loads(options.report.output.read_text())


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_ttft_itl_and_tpot_are_those_of_the_server(endpoint, tmp_path):
    """Each time is compared with the server's own clock readings of the same chunk; both are in one process, so what
    is left is delivery. The median tolerance is 15 ms on a busy machine, that of one sample 200 ms."""
    server = FakeOpenAI(lambda i: Timing(first=0.05 + 0.02 * (i % 3), gaps=(0.02, 0.08, 0.04)))
    in_order = ArrivalOptions(rate=25.0, burstiness=float("inf"))
    with fake_openai(server) as url:
        result = _run(_options(url, endpoint=endpoint, arrivals=in_order, report=_detailed(tmp_path)))
    assert result["completed"] == 8
    assert result["output_lens"] == [4] * 8
    assert all(len(gaps) == 3 for gaps in result["itls"])
    ttft_errors, gap_errors = [], []
    for seen, ttft, gaps in zip(server.seen, result["ttfts"], result["itls"]):
        ttft_errors.append(abs(ttft - (seen.sent[0] - seen.at)))
        gap_errors += np.abs(np.array(gaps) - np.diff(seen.sent)).tolist()
    for errors in (ttft_errors, gap_errors):
        assert np.median(errors) < 0.015
        assert max(errors) < 0.2
    tpot = [sum(gaps) / 3 for gaps in result["itls"]]
    assert result["mean_tpot_ms"] == pytest.approx(1000 * np.mean(tpot), rel=0.15)


def test_tpot_leaves_the_first_token_out_and_counts_tokens_not_chunks(tmp_path):
    server = FakeOpenAI(lambda i: Timing(first=0.3, gaps=(0.05, 0.05), tokens_per_chunk=5))
    with fake_openai(server) as url:
        result = _run(_options(url, count=2, report=_detailed(tmp_path)))
    assert result["output_lens"] == [11, 11]
    assert result["median_ttft_ms"] == pytest.approx(300, abs=60)
    assert result["median_tpot_ms"] == pytest.approx(10, abs=4)
    assert result["median_itl_ms"] == pytest.approx(50, abs=20)
    assert result["median_e2el_ms"] == pytest.approx(400, abs=80)


def test_the_json_has_the_keys_of_vllm_bench_and_percentiles_as_asked(tmp_path):
    report = _detailed(tmp_path, metrics=("ttft", "itl"), percentiles=(50, 99.9))
    with fake_openai(FakeOpenAI(lambda i: Timing(gaps=(0.001,)))) as url:
        result = _run(_options(url, count=3, report=report))
    assert [key for key in VLLM_KEYS if key not in result] == []
    latency_keys = {key for key in result if key.endswith("_ms") and key != "goodput_ms"}
    prefixes = ("mean", "median", "std", "p50", "p99.9")
    assert latency_keys == {f"{p}_{m}_ms" for p in prefixes for m in ("ttft", "itl")}
    assert result["total_input_tokens"] == 21
    assert result["total_output_tokens"] == 6
    assert result["cached_prompt_tokens"] == 12
    assert result["generated_texts"] == ["xx"] * 3
    assert result["request_throughput"] == pytest.approx(3 / result["duration"])
    assert result["total_token_throughput"] == pytest.approx(27 / result["duration"])


def test_goodput_counts_requests_that_meet_all_limits(tmp_path):
    """Two of six are late with the first token, two others are slow afterwards."""

    def timing(i: int) -> Timing:
        return Timing(first=0.6 if i < 2 else 0.0, gaps=(0.4,) if i in (2, 3) else (0.0,))

    report = _detailed(tmp_path, limits=(Limit("ttft", 300.0), Limit("tpot", 200.0)))
    with fake_openai(FakeOpenAI(timing)) as url:
        result = _run(_options(url, count=6, report=report))
    assert result["request_goodput"] == pytest.approx(2 / result["duration"])
    assert result["request_throughput"] == pytest.approx(6 / result["duration"])
    assert result["goodput_ms"] == {"ttft": 300.0, "tpot": 200.0}


@pytest.mark.parametrize("prefix", ["jaxinfer", "vllm"])
def test_counters_of_the_server_are_read_before_and_after(prefix, tmp_path):
    """The warm-up request is sent before the measurement, but after the first scrape."""
    server = FakeOpenAI(prefix=prefix)
    with fake_openai(server) as url:
        result = _run(_options(url, count=8, report=_detailed(tmp_path)))
    assert result["prefix_cache_hit_rate"] == pytest.approx(0.4)
    assert result["preemptions"] == 4


def test_failures_are_counted_by_their_message_and_left_out_of_latencies(tmp_path):
    def timing(i: int) -> Timing:
        if i % 4 == 0:
            return Timing(fail_with=429)
        return Timing(gaps=(0.01, 0.01), fail_after=1 if i % 4 == 1 else None)

    with fake_openai(FakeOpenAI(timing)) as url:
        result = _run(_options(url, report=_detailed(tmp_path)))
    assert (result["completed"], result["failed"]) == (4, 4)
    assert sorted(result["error_counts"].values()) == [2, 2]
    assert any("429" in message and "too busy" in message for message in result["error_counts"])
    assert any("engine died" in message for message in result["error_counts"])
    assert sum(length > 0 for length in result["output_lens"]) == 4


def test_a_closed_loop_keeps_its_concurrency(tmp_path):
    server = FakeOpenAI(lambda i: Timing(first=0.03, gaps=(0.01,)))
    with fake_openai(server) as url:
        result = _run(
            _options(url, count=9, arrivals=ArrivalOptions(max_concurrency=3), report=_detailed(tmp_path))
        )
    assert result["max_concurrent_requests"] == 3
    assert result["duration"] >= 3 * 0.04
    assert result["load_generator_lag_s"] is None


def test_an_open_loop_sends_on_time_whatever_the_server_does(tmp_path):
    """The server needs 0.5 s for each answer, requests come every 20 ms."""
    server = FakeOpenAI(lambda i: Timing(first=0.5))
    arrivals = ArrivalOptions(rate=50.0, burstiness=float("inf"))
    with fake_openai(server) as url:
        result = _run(_options(url, count=20, arrivals=arrivals, report=_detailed(tmp_path)))
    assert result["max_concurrent_requests"] >= 15
    lateness = np.array(result["start_times"]) - np.arange(20) / 50.0
    assert np.median(lateness) < 0.02
    assert lateness.min() > -0.002, "timers have a resolution of 1 ms"
    assert result["load_generator_lag_s"] == pytest.approx(lateness.max())


def test_requests_carry_what_was_asked_and_no_temperature_by_default(tmp_path):
    server = FakeOpenAI()
    with fake_openai(server) as url:
        run_serving(_options(url, count=1, api_key="secret"))
        run_serving(
            _options(url, count=1, endpoint="chat", ignore_eos=True, extra={"temperature": 0, "seed": 3})
        )
    plain, chat = server.seen
    assert plain.headers["authorization"] == "Bearer secret"
    assert set(plain.body) == {"model", "stream", "stream_options", "prompt", "max_tokens"}
    assert plain.body["stream_options"] == {"include_usage": True}
    assert len(plain.body["prompt"]) == 5
    assert all(50 <= token < 950 for token in plain.body["prompt"])
    assert chat.body["messages"][0]["content"].count(" ") == 4
    assert chat.body["max_completion_tokens"] == 4
    assert (chat.body["ignore_eos"], chat.body["temperature"], chat.body["seed"]) == (True, 0, 3)


def test_the_command_prints_a_table_writes_json_and_plot_and_returns_zero(tmp_path):
    output, plot = tmp_path / "deep" / "r.json", tmp_path / "deep" / "r.png"
    server = FakeOpenAI(lambda i: Timing(first=0.01, gaps=(0.002,) * 5))
    with fake_openai(server) as url:
        arguments = [
            "bench",
            "serve",
            "--url",
            url,
            "--num-prompts",
            "6",
            "--input-len",
            "4",
            "--output-len",
            "6",
        ]
        arguments += ["--request-rate", "200", "--goodput", "ttft:500", "tpot:100", "--temperature", "0"]
        done = CliRunner().invoke(app, [*arguments, "--output", str(output), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    assert "Successful requests" in done.output
    assert "goodput" in done.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    result = json.loads(output.read_text())
    assert result["completed"] == 6
    assert "ttfts" not in result
    assert server.seen[0].body["temperature"] == 0


def test_the_command_fails_if_every_request_fails():
    with fake_openai(FakeOpenAI(lambda i: Timing(fail_with=503))) as url:
        done = CliRunner().invoke(app, ["bench", "serve", "--url", url, "--num-prompts", "2"])
    assert done.exit_code == 1
    assert "503" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--goodput", "speed:3"], "ttft:200"),
        (["stray"], "stray"),
        (["--dataset", "trace"], "--dataset-path"),
        (["--percentile-metrics", "tft"], "ttft,tpot,itl,e2el"),
        (["--extra-body", "[1]"], "JSON object"),
        (["--url", "127.0.0.1:80"], "missing an 'http://'"),
        (["--request-rate", "0"], "positive"),
        (["--range-ratio", "1.5"], r"[0, 1)"),
    ],
)
def test_wrong_options_say_what_is_allowed(arguments, message):
    with fake_openai(FakeOpenAI()) as url:
        done = CliRunner().invoke(app, ["bench", "serve", "--url", url, *arguments])
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)


def test_a_server_that_is_not_there_is_one_message():
    with pytest.raises(ServerError, match="no answer from"):
        run_serving(_options("http://127.0.0.1:9"))
