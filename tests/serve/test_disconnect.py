"""A client that leaves ends all engine work of its call, in every state (API-07, SCH-07)."""

import json
import socket
import time
from typing import Any

import pytest

from jaxinfer.request import FinishReason
from tests.support import engines
from tests.support.scripts import endless, say, slow
from tests.support.servers import Server, assert_idle, running_server
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("http", "abort")

STEP = 0.02
LONG = {"prompt": "abc", "max_tokens": 1000, "ignore_eos": True}


@pytest.fixture
def server():
    settings = engines.config(max_num_seqs=4, max_num_batched_tokens=16, num_blocks=600)
    engine = engines.scripted(slow(endless(), STEP), settings, tokenizer=ByteTokenizer(), max_model_len=1100)
    with running_server(engine) as running:
        warm_up(running)
        yield running


def warm_up(server: Server) -> None:
    """Compiles the sampler, so that steps take what the test says."""
    for body in ({}, {"logprobs": 1, "echo": True}):
        assert (
            server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, **body}).status_code
            == 200
        )


def open_call(server: Server, **body: Any) -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    data = json.dumps({**LONG, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    raw.sendall(head.encode() + b"\r\n\r\n" + data)
    return raw


def read_chunks(raw: socket.socket, count: int) -> None:
    data = b""
    while data.count(b"data: ") < count:
        data += raw.recv(4096)


def wait_for_running(server: Server, sequences: int = 1) -> None:
    wait(lambda: server.client.get("/load").json()["server_load"] >= sequences, 5)


def wait(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def stats(server: Server):
    return server.engine.core.stats


def assert_gone(server: Server, calls: int = 1, rows: int = 4) -> None:
    """Nothing of the calls is left within ten steps of so many rows, give or take a busy machine."""
    wait(lambda: server.client.get("/load").json()["server_load"] == 0, 10 * STEP * rows + 1)
    assert_idle(server)
    assert stats(server).generated_tokens < calls * 40


@pytest.mark.parametrize(
    ("body", "chunks", "sequences"),
    [
        ({"stream": True}, 0, 1),
        ({"stream": True}, 3, 1),
        ({"stream": False}, 0, 1),
        ({"stream": False, "n": 3}, 0, 3),
        ({"stream": True, "n": 3}, 4, 3),
        ({"stream": False, "prompt": ["a", "b", "c"]}, 0, 3),
        ({"stream": True, "prompt": ["a", "b", "c"]}, 2, 3),
        ({"stream": False, "prompt": "long prompt " * 60, "max_tokens": 100}, 0, 1),
        ({"stream": True, "prompt": "long prompt " * 20, "echo": True, "logprobs": 1}, 0, 1),
    ],
)
def test_api_07_disconnect_aborts(server, body, chunks, sequences):
    before = dict(stats(server).finished_by_reason)
    raw = open_call(server, **body)
    wait_for_running(server, sequences)
    read_chunks(raw, chunks)
    raw.close()
    assert_gone(server, sequences, rows=16 if "logprobs" in body else 4)  # a scored token is a row
    aborted = stats(server).finished_by_reason[FinishReason.ABORT] - before.get(FinishReason.ABORT, 0)
    assert aborted == sequences
    whole = server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
    assert whole.json()["choices"][0]["text"] == "xxx"


def test_api_07_disconnect_while_queued(server):
    first = [open_call(server, prompt=f"{i}") for i in range(4)]
    wait_for_running(server, 4)
    queued = [open_call(server, stream=stream, n=2) for stream in (True, False)]
    wait_for_running(server, 8)
    for raw in queued:
        raw.close()
    wait(lambda: server.client.get("/load").json()["waiting"] == 0, 2)
    assert server.client.get("/load").json()["running"] == 4
    for raw in first:
        raw.close()
    assert_gone(server, 8)


def test_api_07_disconnect_between_keep_alive_comments():
    engine = engines.scripted(slow(endless(), 0.1), tokenizer=ByteTokenizer())
    with running_server(engine, sse_keep_alive=0.02) as server:
        warm_up(server)
        raw = open_call(server, stream=True)
        data = b""
        while b": keep-alive" not in data:
            data += raw.recv(4096)
        raw.close()
        wait(lambda: server.client.get("/load").json()["server_load"] == 0, 3)
        assert_idle(server)


def test_api_07_a_hundred_disconnects_in_a_row(server):
    for i in range(100):
        raw = open_call(server, stream=i % 2 == 0, n=1 + i % 3)
        if i % 4 == 0:
            read_chunks(raw, 1)
        raw.close()
    assert_gone(server, 100)


def test_api_07_others_do_not_notice(server):
    raw = open_call(server, stream=True, n=2)
    read_chunks(raw, 1)
    other = open_call(server, prompt="b", max_tokens=20, stream=True)
    read_chunks(other, 2)
    raw.close()
    read_chunks(other, 15)
    other.close()


def test_api_07_normal_ends_send_no_abort():
    engine = engines.scripted(say(list(b"ok")), tokenizer=ByteTokenizer())
    with running_server(engine) as server:
        for i in range(100):
            body = {"prompt": "a", "stream": i % 2 == 0, "n": 1 + i % 2}
            assert server.client.post("/v1/completions", json=body).status_code == 200
        assert stats(server).finished_by_reason[FinishReason.ABORT] == 0
        assert_idle(server)


def test_sch_07_abort_in_any_state_over_http():
    """The client leaves after every possible delay of a request with prompt log-probabilities, in chunks of four,
    while others run; one terminal state, nothing left, and the whole pool can be used at the end."""
    settings = engines.config(max_num_seqs=4, max_num_batched_tokens=16, chunk_size=4, num_blocks=17)
    script = slow(endless(), 0.001)
    with running_server(engines.scripted(script, settings, tokenizer=ByteTokenizer())) as server:
        warm_up(server)
        other = {"prompt": "other prompt", "max_tokens": 20, "temperature": 0}
        expected = server.client.post("/v1/completions", json=other).json()["choices"]
        for i in range(60):
            raw = open_call(
                server, prompt="sixteen letters!", echo=True, logprobs=1, max_tokens=4, stream=i % 2 == 0
            )
            time.sleep(i * 0.0005)
            raw.close()
            if i % 6 == 0:
                assert server.client.post("/v1/completions", json=other).json()["choices"] == expected
        wait(lambda: server.client.get("/load").json()["server_load"] == 0, 5)
        assert_idle(server)
        finished = stats(server).finished_by_reason
        assert set(finished) <= {FinishReason.ABORT, FinishReason.LENGTH}
        whole = server.client.post("/v1/completions", json={"prompt": "x" * 40, "max_tokens": 24})
        assert whole.json()["usage"]["completion_tokens"] == 24


def test_request_id_that_is_in_use_is_refused(server):
    raw = open_call(server, request_id="mine", stream=True)
    read_chunks(raw, 1)
    second = server.client.post("/v1/completions", json={"prompt": "b", "request_id": "mine"})
    assert second.status_code == 400
    assert second.json()["error"]["param"] == "request_id"
    raw.close()
    assert_gone(server)
    again = server.client.post("/v1/completions", json={"prompt": "b", "request_id": "mine", "max_tokens": 2})
    assert again.status_code == 200
