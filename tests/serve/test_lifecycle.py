"""Life and death of a real ``jaxinfer serve`` with a tiny model."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import tiny_checkpoint
from tests.support.serve_process import EventReader, is_gone, serve_process
from tests.support.variants import variants

pytestmark = pytest.mark.feature("server lifecycle")

LONG = tiny_checkpoint.MAX_MODEL_LEN - 100


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("model") / "tiny")


def test_sigterm_drains(model):
    """A stream that is open ends as usual; meanwhile new requests get 503 with Retry-After, and the server is alive but
    not ready. Then it leaves with status 0, without a process or a file of it."""
    with serve_process(model, {"server.shutdown_timeout": 60}, simulated=False) as server:
        assert server.get("/ready").status_code == 200
        engine = server.engine_pid
        stream = EventReader(server, max_tokens=1500)
        stream.wait_for(5)
        server.signal(signal.SIGTERM)
        time.sleep(0.3)
        refused = server.complete(max_tokens=1)
        assert (refused.status_code, refused.headers.get("retry-after")) == (503, "1")
        assert refused.json()["error"]["type"] == "service_unavailable_error"
        assert server.get("/ready").status_code == 503
        assert server.get("/health").status_code == 200
        events = stream.finish(60)
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert server.exit_status(10) == 0
        assert is_gone(engine, 1)
        assert server.private_files() == []
        assert "Traceback" not in server.text()


@pytest.mark.parametrize(
    ("second", "status"),
    variants([(signal.SIGTERM, 143), (signal.SIGINT, 130)], quick=[(signal.SIGINT, 130)]),
)
def test_a_second_signal_stops_at_once(model, second, status):
    """Open streams end with an error event, not as if they were complete."""
    with serve_process(model, {"server.shutdown_timeout": 60}) as server:
        engine = server.engine_pid
        stream = EventReader(server, max_tokens=LONG)
        stream.wait_for(5)
        server.signal(signal.SIGTERM)
        time.sleep(0.3)
        server.signal(second)
        assert server.exit_status(5) == status
        assert is_gone(engine, 1)
        events = stream.finish(5)
        assert "shut down" in events[-2]["error"]["message"]
        assert events[-1] == "[DONE]"


@pytest.mark.parametrize("where", variants(["process", "thread"], quick=["thread"]))
def test_the_drain_time_ends_what_is_too_long(model, where):
    with serve_process(model, {"server.shutdown_timeout": 0.5, "server.engine": where}) as server:
        stream = EventReader(server, max_tokens=LONG)
        stream.wait_for(5)
        server.signal(signal.SIGTERM)
        assert server.exit_status(8) == 0
        events = stream.finish(5)
        assert "shuts down" in events[-2]["error"]["message"]


def test_api_08_the_death_of_the_engine_ends_streams_and_server(model):
    """The engine process is killed: streams get an error event within 2 s, /health is 503 as long as the server still
    answers, and its status is 1."""
    with serve_process(model) as server:
        streams = [EventReader(server, max_tokens=LONG) for _ in range(3)]
        for stream in streams:
            stream.wait_for(3)
        os.kill(server.engine_pid, signal.SIGKILL)
        killed = time.monotonic()
        for stream in streams:
            events = stream.finish(2)
            assert "error" in events[-2]
            assert events[-1] == "[DONE]"
        health = server.get("/health")
        assert health.status_code == 503
        assert "status -9" in health.json()["error"]["message"]
        assert server.complete(max_tokens=1).status_code in (500, 503)
        assert server.exit_status(10) == 1
        assert time.monotonic() - killed < 10
        assert "the engine is dead" in server.text()


@pytest.mark.parametrize("where", variants(["process", "thread"], quick=["process"]))
def test_api_08_a_step_that_hangs_ends_streams_and_server(tmp_path, where):
    """Within the watchdog time, and without waiting for the step."""
    model = tiny_checkpoint.write(tmp_path / "hang")
    with serve_process(model, {"server.watchdog": 1, "server.engine": where}) as server:
        begun = time.monotonic()
        stream = EventReader(server, max_tokens=LONG)
        events = stream.finish(6)
        assert "finished no step for 1 s" in events[-2]["error"]["message"]
        assert events[-1] == "[DONE]"
        assert server.get("/health").status_code == 503
        assert server.exit_status(20) == 1
        assert time.monotonic() - begun < 20


def test_the_engine_process_does_not_outlive_the_server(model):
    with serve_process(model) as server:
        engine = server.engine_pid
        assert len(server.private_files()) == 1
        server.signal(signal.SIGKILL)
        assert is_gone(engine, 5)
        assert server.private_files() == []


def test_a_signal_during_the_start(model):
    with serve_process(model, wait=False) as server:
        end = time.monotonic() + 30
        # The file is there before the process that reads it.
        while not (server.private_files() and server.child_pids) and time.monotonic() < end:
            time.sleep(0.02)
        engine = server.engine_pid
        server.signal(signal.SIGINT)
        assert server.exit_status(10) == 130
        assert is_gone(engine, 2)
        assert server.private_files() == []


def _serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from serve.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_port_in_use_is_one_clear_error(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = _serve("--model", str(model), "--port", str(port))
    assert result.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_broken_model_is_one_clear_error(tmp_path):
    """What is wrong is found in the engine process and told by the server."""
    (tmp_path / "config.json").write_text("{")
    result = _serve("--model", str(tmp_path), "--port", "0")
    assert result.returncode == 2
    assert "error:" in result.stderr
    assert str(tmp_path) in result.stderr
    assert "Traceback" not in result.stderr


def test_the_api_process_loads_no_jax():
    """Nor anything else of the engine that could take a device."""
    code = "import sys, serve.cli, serve.run; print(sorted({'jax', 'flax', 'jaxinfer.engine.core'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "[]", result.stderr
