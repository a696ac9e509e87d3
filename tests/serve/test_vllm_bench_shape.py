"""The requests of ``vllm bench serve`` 0.32, field by field, and its way to read the answers (client_surface 5.1)."""

import json
import time
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from jaxinfer.runner.simulated import CostModel
from jaxinfer.tokenization.chat import ChatTemplate
from tests.support import engines
from tests.support.servers import Server, running_server
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("vllm bench serve", "http")

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@dataclass
class Reading:
    """What the tool takes from one stream."""

    ttft: float | None = None
    itl: list[float] = field(default_factory=list)
    text: str = ""
    output_tokens: int | None = None
    prompt_tokens: int | None = None


@pytest.fixture(scope="module")
def server():
    settings = engines.config(num_blocks=256, max_num_seqs=4)
    engine = engines.simulated(settings, CostModel(0.01), tokenizer=ByteTokenizer(), max_model_len=256)
    engine = replace(engine, chat_template=ChatTemplate({"default": TEMPLATE}))
    with running_server(engine, vllm_metrics=True) as running:
        yield running


def _model(server: Server) -> str:
    return str(server.client.get("/v1/models").json()["data"][0]["id"])


def _read(server: Server, path: str, payload: dict[str, Any], text_of: str) -> tuple[httpx.Headers, Reading]:
    """Reads a stream as the tool does: messages end with a blank line, comments are skipped, times are taken from
    chunks with choices, and usage from the chunk without."""
    reading = Reading()
    start = latest = time.perf_counter()
    headers = {"x-request-id": "bench-0", "Content-Type": "application/json"}
    buffer = ""
    with server.client.stream("POST", path, json=payload, headers=headers) as response:
        assert response.status_code == 200, response.read()
        for data in response.iter_text():
            buffer += data
            *messages, buffer = buffer.split("\n\n")
            for message in messages:
                content = message.strip().removeprefix("data: ")
                if message.startswith(":") or content == "[DONE]":
                    continue
                chunk = json.loads(content)
                now = time.perf_counter()
                if chunk.get("choices"):
                    choice = chunk["choices"][0]
                    reading.text += (choice["delta"] if text_of == "delta" else choice).get(
                        "content" if text_of == "delta" else "text"
                    ) or ""
                    if reading.ttft is None:
                        reading.ttft = now - start
                    else:
                        reading.itl.append(now - latest)
                    latest = now
                elif chunk.get("usage"):
                    reading.output_tokens = chunk["usage"]["completion_tokens"]
                    reading.prompt_tokens = chunk["usage"]["prompt_tokens"]
    assert buffer == ""
    return response.headers, reading


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_completions_requests_and_their_usage(server, ignore_eos):
    """``logprobs: null`` and ``repetition_penalty: 1.0`` are always sent, a temperature is not. The simulated
    tokens depend on the request's id, so an end token may come early where it counts."""
    payload: dict[str, Any] = {
        "model": _model(server),
        "prompt": "x" * 20,
        "repetition_penalty": 1.0,
        "max_tokens": 8,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:
        payload["ignore_eos"] = True
    headers, reading = _read(server, "/v1/completions", payload, "text")
    assert headers["x-request-id"] == "bench-0"
    assert reading.ttft is not None
    assert reading.prompt_tokens == 20
    if ignore_eos:
        assert reading.output_tokens == 8
        assert len(reading.itl) >= 1, "steps of 10 ms do not come in one chunk"
    else:
        assert reading.output_tokens in range(9)


def test_chat_requests_and_their_usage(server):
    content = [{"type": "text", "text": "x" * 20}]
    payload = {
        "model": _model(server),
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    _, reading = _read(server, "/v1/chat/completions", payload, "delta")
    assert reading.ttft is not None
    assert reading.output_tokens == 8
    assert reading.prompt_tokens == len("user: " + "x" * 20 + "\n")


def test_sampling_options_of_the_tool_are_accepted(server):
    """What ``--temperature`` and its neighbours add to the body."""
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 10,
        "min_p": 0.05,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "repetition_penalty": 1.1,
        "logprobs": 2,
    }
    base = {"model": _model(server), "prompt": "abc", "max_tokens": 3, "stream": True, "ignore_eos": True}
    payload = {**base, "stream_options": {"include_usage": True}, **options}
    _, reading = _read(server, "/v1/completions", payload, "text")
    assert reading.output_tokens == 3


def test_the_names_of_vllm_are_exported_for_its_scraper(server):
    """The tool looks at lines that begin with ``vllm:``; without speculation there are none of ``vllm:spec_decode``."""
    text = server.client.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("vllm:")]
    names = {line.split("{")[0].split(" ")[0] for line in lines}
    assert {
        "vllm:num_requests_running",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_hits_total",
    } <= names
