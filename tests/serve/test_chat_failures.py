"""What chat clients see of failures, and what leaves with them."""

import asyncio
import json
import socket
import time

import httpx
import pytest

from serve.parsers.base import Event
from serve.parsers.pipeline import PlainParser
from tests.support.parrot import parrot_engine
from tests.support.servers import Server, assert_idle, fold_chat, running_server, sse_events

pytestmark = pytest.mark.feature("http", "chat", "failure")


def body(said: str, **fields) -> dict:
    return {"messages": [{"role": "user", "content": said}], **fields}


def post(server: Server, **fields) -> httpx.Response:
    return server.client.post("/v1/chat/completions", json=fields)


def answer(server: Server, said: str, **fields) -> str:
    response = post(server, **body(said, **fields))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


# ---- API-08


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_api_08_a_model_that_fails_as_a_whole(path):
    """All calls in flight end with an error at once, and the server says that it is ill."""

    async def run(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:

            def call(said: str, stream: bool):
                given = {"input": said} if path.endswith("responses") else body(said)
                return client.post(path, json={**given, "stream": stream})

            waiting = [call("<wait>" * 400, True), call("<wait>" * 400, False), call("x" * 400, True)]
            return await asyncio.gather(*waiting, call("<wait>" * 30 + "<crash>", True))

    with running_server(parrot_engine()) as server:
        started = time.monotonic()
        responses = asyncio.run(run(server.url))
        assert time.monotonic() - started < 30
        assert server.client.get("/health").status_code == 503
        assert post(server, **body("ok")).status_code in (500, 503)
    for response in responses:
        if response.status_code == 200 and path.endswith("responses"):
            last = json.loads(response.text.strip().split("\n\n")[-1].split("data: ")[1])
            assert last["type"] in ("response.failed", "response.completed")
        elif response.status_code == 200:
            folded = fold_chat(sse_events(response))
            assert folded.done
            assert (folded.error is None) == (folded.choices[0].finish_reason is not None)
        else:
            assert response.status_code == 500
            assert response.json()["error"]["type"] == "server_error"
    assert responses[1].status_code == 500
    assert responses[3].status_code == 200


def test_api_08_a_parser_that_fails(monkeypatch):
    """Such a call ends with an error, and what it had in the engine is aborted."""
    push = PlainParser.push

    def failing(self: PlainParser, text: str) -> list[Event]:
        if "!" in text:
            raise ValueError("the parser has a bug")
        return push(self, text)

    monkeypatch.setattr(PlainParser, "push", failing)
    said = "<wait>" * 20 + "!" + "<wait>" * 500
    with running_server(parrot_engine()) as server:
        events = sse_events(post(server, **body(said, stream=True)))
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == 500
        response = post(server, **body(said))
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert answer(server, "ok") == "ok"
        assert_idle(server)
        assert server.engine.core.stats.generated_tokens < 500


# ---- API-07


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_api_07_a_client_that_leaves_aborts_its_chat(path, stream):
    said = "<wait>" * 500
    given = {"input": said} if path.endswith("responses") else body(said, n=2)
    data = json.dumps({**given, "stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with running_server(parrot_engine()) as server:
        assert answer(server, "ok") == "ok"
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
            raw.sendall(head.encode() + data)
            if stream:
                assert raw.recv(100)
            else:
                time.sleep(0.3)
        deadline = time.monotonic() + 10
        while server.client.get("/load").json()["server_load"]:
            assert time.monotonic() < deadline, "the call still runs"
            time.sleep(0.02)
        assert_idle(server)
        assert server.engine.core.stats.generated_tokens < 300


# ---- API-01


def test_api_01_a_chat_whose_template_renders_to_nothing():
    with running_server(parrot_engine("{# nothing #}")) as server:
        response = post(server, **body("x"))
        assert response.status_code == 400
        assert response.json()["error"]["param"] in ("messages", "prompt")
        assert server.client.get("/health").status_code == 200
