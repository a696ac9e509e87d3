"""Small requests that ask for huge work are refused at once (API-03), while the server goes on answering."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.support import engines
from tests.support.scripts import endless, say, slow
from tests.support.servers import Server, running_server
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("http", "completions")

MAX_SECONDS, MAX_GROWTH, MAX_PROBE = 1.0, 50e6, 0.2
TRIES = 3
HUGE: dict[str, Any] = {
    "n": {"n": 5_000_000},
    "best_of": {"best_of": 5_000_000},
    "stop strings": {"stop": ["x"] * 500_000},
    "more stop strings than this server allows": {"stop": list("abcdefghijklmnopq")},
    "long stop string": {"stop": "x" * 1_000_000},
    "stop strings of the wrong type": {"stop": [1] * 500_000},
    "empty stop string": {"stop": [""]},
    "bad words": {"bad_words": ["word"] * 50_000},
    "logit bias": {"logit_bias": {str(i): 1 for i in range(100_000)}},
    "stop token ids": {"stop_token_ids": list(range(300)) * 1000},
    "allowed token ids": {"allowed_token_ids": [2**40] * 500_000},
    "negative id": {"prompt": [-1]},
    "id outside the vocabulary": {"prompt": [320]},
    "id of 32 bits": {"prompt": [2**31]},
    "id of 64 bits": {"prompt": [2**63]},
    "id of 200 bits": {"prompt": [2**200]},
    "fraction": {"prompt": [1.5]},
    "text among ids": {"prompt": [1, "a"]},
    "boolean": {"prompt": [True]},
    "prompts": {"prompt": ["a"] * 100_000},
    "prompts of ids": {"prompt": [[1]] * 100_000},
    "prompts times n": {"prompt": ["a"] * 1000, "n": 100},
    "long text": {"prompt": "x" * 5_000_000},
    "long list of ids": {"prompt": [1] * 1_000_000},
    "max_tokens": {"max_tokens": 2**63},
    "unknown fields": {f"field{i}": 1 for i in range(100_000)},
    "grammar": {"structured_outputs": {"regex": "a" * 1_000_000}},
    "logit bias of the wrong type": {"logit_bias": {str(i): "x" for i in range(100_000)}},
    "bad words of the wrong type": {"bad_words": [1] * 500_000},
    "unknown stream options": {"stream_options": {f"field{i}": 1 for i in range(100_000)}},
    "choices": {"structured_outputs": {"choice": ["x"] * 500_000}},
}


@pytest.fixture(scope="module")
def server():
    engine = engines.scripted(say(list(b"ok")), tokenizer=ByteTokenizer())
    with running_server(engine) as running:
        running.client.post("/v1/completions", json={"prompt": "a"})  # compiles the sampler
        yield running


class Probe:
    """Asks for the health all the time and notes the slowest answer."""

    def __init__(self, url: str) -> None:
        self.slowest = 0.0
        self._client = httpx.Client(base_url=url)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            start = time.monotonic()
            assert self._client.get("/health").status_code == 200
            self.slowest = max(self.slowest, time.monotonic() - start)
            time.sleep(0.005)

    def __enter__(self) -> "Probe":
        self._thread.start()
        time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()


@pytest.mark.parametrize("case", HUGE)
def test_api_03_refused_in_time_proportional_to_the_body(server, case):
    body = json.dumps({"prompt": "a", "max_tokens": 4, **HUGE[case]}).encode()
    process = psutil.Process()
    before = process.memory_info().rss
    # The fastest of a few tries: what the machine does besides may hold one up, what the server does holds all up.
    tries = [_post(server, body) for _ in range(TRIES)]
    assert process.memory_info().rss - before < MAX_GROWTH + 3 * len(body)
    assert min(seconds for seconds, _ in tries) < MAX_SECONDS
    assert min(slowest for _, slowest in tries) < max(MAX_PROBE, 3 * _idle_probe(server))


def _idle_probe(server: Server) -> float:
    """Seconds that a probe takes while the server has nothing else to do; long only on a busy machine."""
    with Probe(server.url) as probe:
        time.sleep(0.2)
    return probe.slowest


def _post(server: Server, body: bytes) -> tuple[float, float]:
    """Seconds until the refusal, and of the slowest answer to a probe meanwhile."""
    with Probe(server.url) as probe:
        start = time.monotonic()
        response = server.client.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        seconds = time.monotonic() - start
    assert response.status_code == 400, response.text[:300]
    assert len(response.content) < 5000
    return seconds, probe.slowest


def test_api_03_the_last_id_of_the_vocabulary_is_served(server):
    for body in ({"prompt": [319]}, {"stop": ["a", "b", "c", "d"]}, {"bad_words": ["z"] * 128}):
        response = server.client.post("/v1/completions", json={"prompt": "a", **body})
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == "ok"


def test_overload_is_429_with_retry_after():
    settings = engines.config(max_num_seqs=1, max_waiting_seqs=1, max_num_batched_tokens=64)
    engine = engines.scripted(slow(endless(), 0.01), settings, tokenizer=ByteTokenizer())
    with running_server(engine, retry_after=7) as server, ThreadPoolExecutor(6) as pool:
        body = {"prompt": "a", "max_tokens": 50}
        responses = list(pool.map(lambda _: server.client.post("/v1/completions", json=body), range(6)))
        refused = [response for response in responses if response.status_code != 200]
        assert 1 <= len(refused) <= 4
        for response in refused:
            assert response.status_code == 429, response.text
            assert response.headers["retry-after"] == "7"
            assert response.json()["error"]["type"] == "rate_limit_error"
        assert server.client.get("/load").json()["server_load"] == 0
        assert server.client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        too_many = server.client.post("/v1/completions", json={"prompt": ["a", "b"]})
        assert too_many.status_code == 400, "a call that can never be admitted is not worth a retry"
