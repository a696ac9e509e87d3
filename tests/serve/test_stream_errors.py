"""What clients see when a request fails after it was admitted (API-08, SMP-08)."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.support import engines
from tests.support.engines import VOCAB
from tests.support.scripts import broken, endless, raising, say, slow
from tests.support.servers import Server, assert_idle, fold_completion, running_server, sse_events
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("http", "completions", "failure")

HEALTHY = say(list(b"healthy"))


def row(value: float, everywhere: bool) -> np.ndarray:
    logits = np.full(VOCAB, -20.0, np.float32)
    logits[ord("y")] = 20.0
    if everywhere:
        logits[:] = value
    else:
        logits[7] = value
    return logits


def serve(script):
    return running_server(engines.scripted(script, tokenizer=ByteTokenizer()))


def assert_works(server: Server) -> None:
    """A later request is served, and nothing is left behind."""
    assert server.client.get("/health").status_code == 200
    response = server.client.post("/v1/completions", json={"prompt": "good"})
    assert response.json()["choices"][0]["text"] == "healthy"
    assert_idle(server)


def assert_ends_with_error(response: httpx.Response) -> None:
    events = sse_events(response)
    assert events[-1] == "[DONE]"
    assert set(events[-2]) == {"error"}
    assert events[-2]["error"]["code"] == 500
    for choice in fold_completion(events).choices.values():
        assert "healthy".startswith(choice.text)
        assert choice.text != "healthy"
        assert choice.finish_reason is None


BAD_ROWS = {
    "all NaN": row(np.nan, True),
    "one NaN": row(np.nan, False),
    "one +inf": row(np.inf, False),
    "all -inf": row(-np.inf, True),
}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("case", BAD_ROWS)
def test_smp_08_logits_that_are_not_finite(case, temperature, n):
    """Two tokens, then an error, and never a finish reason that looks like success."""
    with serve(slow(broken(HEALTHY, "bad", 2, BAD_ROWS[case]), 0.01)) as server:
        body = {"prompt": "bad", "temperature": temperature, "n": n}
        whole = server.client.post("/v1/completions", json=body)
        assert whole.status_code == 500
        assert whole.json()["error"]["type"] == "server_error"
        with ThreadPoolExecutor(1) as pool:
            good = pool.submit(server.client.post, "/v1/completions", json={"prompt": "good"})
            streamed = server.client.post("/v1/completions", json={**body, "stream": True})
            assert good.result().json()["choices"][0]["text"] == "healthy"
        if streamed.status_code == 200:
            assert_ends_with_error(streamed)
        else:  # the server was so slow that it read the error together with the tokens: the headers were still open
            assert streamed.status_code == 500
            assert streamed.json()["error"]["code"] == 500
        assert_works(server)


def test_smp_08_minus_infinity_alone_is_no_error():
    masked = row(-np.inf, False)
    with serve(broken(HEALTHY, "bad", 2, masked)) as server:
        response = server.client.post("/v1/completions", json={"prompt": "bad"})
        assert response.json()["choices"][0]["text"] == "heylthy"


def test_smp_08_nothing_of_a_failed_request_is_cached():
    """The same prompt, once it is healthy, gets a right answer and finds no poisoned block."""
    bad = True

    def script(request, index, position):
        if (
            bad
            and request.prompt_token_ids[:1] == (ord("s"),)
            and position - len(request.prompt_token_ids) == 1
        ):
            return row(np.nan, True)
        return HEALTHY(request, index, position)

    with serve(script) as server:
        body = {"prompt": "some longer prompt"}
        assert server.client.post("/v1/completions", json=body).status_code == 500
        bad = False
        answer = server.client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == "healthy"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_api_08_one_request_fails(at, n):
    """Before the first token the headers are still open, so it is a real HTTP error; after it, an event."""
    with serve(slow(broken(HEALTHY, "bad", at), 0.02)) as server:
        assert_works(server)
        response = server.client.post("/v1/completions", json={"prompt": "bad", "n": n, "stream": True})
        if at == 0:
            assert response.status_code == 500
            assert response.headers["content-type"] == "application/json"
            assert response.json()["error"]["code"] == 500
        else:
            events = sse_events(response)
            assert events[-1] == "[DONE]"
            assert "error" in events[-2]
        assert_works(server)


@pytest.mark.parametrize("at", [0, 3])
def test_api_08_the_whole_engine_fails(at):
    """All in flight, and all that wait, hear of it within two seconds; health tells it."""
    settings = engines.config(max_num_seqs=4, num_blocks=600)
    failed: list[float] = []
    script = slow(raising(endless(), "bad", at, failed), 0.02)
    engine = engines.scripted(script, settings, tokenizer=ByteTokenizer(), max_model_len=1100)
    with running_server(engine) as server, ThreadPoolExecutor(4) as pool:
        server.client.post("/v1/completions", json={"prompt": "warm", "max_tokens": 1})
        calls = []
        for body in (
            {"prompt": "one", "stream": True},
            {"prompt": "whole", "stream": False},
            {"prompt": "bad", "stream": True},
            {"prompt": "waits", "stream": True, "n": 4},
        ):
            calls.append(pool.submit(server.client.post, "/v1/completions", json={**body, "max_tokens": 500}))
            if body["prompt"] in ("one", "whole"):
                while server.client.get("/load").json()["running"] < len(calls):
                    time.sleep(0.005)
        answers = [call.result() for call in calls]
        assert time.monotonic() - failed[0] < 2
        for answer in answers:
            assert_engine_failed(answer)
        health = server.client.get("/health")
        assert health.status_code == 503
        assert health.json()["error"]["type"] == "service_unavailable_error"
        late = server.client.post("/v1/completions", json={"prompt": "late"})
        assert late.status_code == 500


def assert_engine_failed(answer: httpx.Response) -> None:
    if answer.status_code != 200:
        assert answer.status_code == 500
        assert "the engine failed" in answer.json()["error"]["message"]
        return
    events = sse_events(answer)
    assert events[-1] == "[DONE]"
    assert "the engine failed" in events[-2]["error"]["message"]
    assert all(choice.finish_reason is None for choice in fold_completion(events).choices.values())


def test_api_08_a_bug_in_the_server_ends_the_stream_with_an_error(monkeypatch):
    """What nobody foresaw is told as an error too, without details."""
    from serve.completion_output import CompletionWriter

    with serve(HEALTHY) as server:
        write = CompletionWriter.write

        def fails_late(self, news):
            if not news.first:
                raise KeyError("secret detail")
            return write(self, news)

        monkeypatch.setattr(CompletionWriter, "write", fails_late)
        events = sse_events(server.client.post("/v1/completions", json={"prompt": "a", "stream": True}))
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == 500
        assert "secret" not in str(events)
        monkeypatch.undo()
        assert_works(server)


def test_silent_streams_get_comments():
    settings = engines.config()
    with running_server(
        engines.scripted(slow(say(list(b"abc")), 0.15), settings, tokenizer=ByteTokenizer()),
        sse_keep_alive=0.03,
    ) as server:
        response = server.client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert response.text.count(": keep-alive\n\n") >= 3
        folded = fold_completion(sse_events(response))
        assert folded.choices[0].text == "abc"
        assert folded.done
