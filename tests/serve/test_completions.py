"""``/v1/completions``: prompt forms, choices, streams, clients."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from tests.support import engines
from tests.support.completions import complete, same_both_ways
from tests.support.scripts import say, slow
from tests.support.servers import assert_idle, fold_completion, running_server, sse_events
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("http", "completions")


@pytest.fixture(scope="module")
def server():
    engine = engines.scripted(say(list(b"four")), tokenizer=ByteTokenizer())
    with running_server(engine) as running:
        yield running


def test_answer_has_the_shape_that_clients_read(server):
    answer = complete(server, prompt="ab")
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "test"
    assert answer["choices"] == [
        {"index": 0, "text": "four", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"]["total_tokens"] == 6


@pytest.mark.parametrize(
    ("prompt", "count", "tokens"),
    [
        ("ab", 1, 2),
        (["ab"], 1, 2),
        (["ab", "abc"], 2, 5),
        ([97, 98], 1, 2),
        ([[97, 98], [99], [1, 2, 3]], 3, 6),
        ([319], 1, 1),
    ],
)
def test_prompt_forms(server, prompt, count, tokens):
    answer = same_both_ways(server, prompt=prompt, n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * count))
    assert answer["usage"]["prompt_tokens"] == tokens


def test_choices_of_several_prompts_are_numbered_by_prompt():
    """index = prompt index * n + choice index."""
    script = say({"a": list(b"from a"), "b": list(b"from b")})
    with running_server(engines.scripted(script, tokenizer=ByteTokenizer())) as server:
        answer = same_both_ways(server, prompt=["a", "b"], n=2, echo=True)
        assert [c["text"] for c in answer["choices"]] == ["afrom a", "afrom a", "bfrom b", "bfrom b"]


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [""],
        [],
        [[]],
        ["a", ""],
        [[1], []],
        None,
        5,
        True,
        {},
        ["a", [1]],
        [[1], "a"],
        [[[1]]],
        ["a", None],
    ],
)
@pytest.mark.parametrize(
    "more", [{}, {"echo": True}, {"echo": True, "max_tokens": 0, "logprobs": 1}, {"n": 2}]
)
def test_api_01_empty_and_malformed_prompts_are_400(server, prompt, more):
    """Without BOS an empty prompt has no tokens; a list with one is refused as a whole."""
    response = server.client.post("/v1/completions", json={"prompt": prompt, **more}, timeout=2)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "prompt"
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/load").json()["server_load"] == 0
    assert_idle(server)


def test_api_01_missing_prompt_is_400(server):
    response = server.client.post("/v1/completions", json={})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


def test_api_01_with_bos_an_empty_prompt_is_one_token():
    engine = engines.scripted(say(list(b"four")), tokenizer=ByteTokenizer(add_bos=True))
    with running_server(engine) as server:
        answer = same_both_ways(server, prompt="", echo=True, logprobs=0)
        assert answer["usage"]["prompt_tokens"] == 1
        assert answer["choices"][0]["text"] == "four"
        assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1, 2, 3]
        assert complete(server, prompt=["a", ""])["usage"]["prompt_tokens"] == 3
        for empty in ([], [[]], [[1], []]):
            assert server.client.post("/v1/completions", json={"prompt": empty}).status_code == 400
        without = server.client.post("/v1/completions", json={"prompt": "", "add_special_tokens": False})
        assert without.status_code == 400


def test_prompt_lengths_at_the_context_limit(server):
    """The context holds 64 tokens, prompt and output together; scoring needs no room for output."""
    one_left = complete(server, prompt="x" * 63, max_tokens=100)
    assert one_left["usage"]["completion_tokens"] == 1
    assert one_left["choices"][0]["finish_reason"] == "length"
    full = server.client.post("/v1/completions", json={"prompt": "x" * 64})
    assert full.status_code == 400
    assert "64" in full.json()["error"]["message"]
    scored = complete(server, prompt="x" * 64, max_tokens=0, echo=True, logprobs=1)
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == 64
    too_long = server.client.post("/v1/completions", json={"prompt": "x" * 5_000_000})
    assert too_long.status_code == 400
    assert too_long.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("interval", [2, 100])
def test_stream_interval_joins_tokens_but_not_the_first(interval):
    engine = engines.scripted(slow(say(list(b"0123456789")), 0.02), tokenizer=ByteTokenizer())
    with running_server(engine) as server:
        complete(server, prompt="a", max_tokens=1)
        body = {"prompt": "a", "stream": True, "stream_interval": interval, "return_token_ids": True}
        chunks = sse_events(server.client.post("/v1/completions", json=body))[:-1]
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == "0123456789"
    assert texts[0] == "0"
    assert all(len(text) >= min(interval, 9) for text in texts[1:-1])
    assert len(texts) <= 2 + 9 // interval


def test_metrics_on_request(server):
    metrics = complete(server, prompt="a", return_metrics=True)["metrics"]
    assert metrics["time_to_first_token_ms"] >= metrics["queue_time_ms"] >= 0
    assert metrics["mean_itl_ms"] > 0
    body = {"prompt": "a", "return_metrics": True, "stream": True, "stream_options": {"include_usage": True}}
    chunks = sse_events(server.client.post("/v1/completions", json=body))
    assert chunks[-2]["metrics"].keys() == metrics.keys()
    assert "metrics" not in complete(server, prompt="a")
    several = server.client.post("/v1/completions", json={"prompt": "a", "return_metrics": True, "n": 2})
    assert several.status_code == 400


def test_ids_of_answers_are_unique_and_show_the_request_id(server):
    ids = [complete(server, prompt="a", request_id="mine")["id"] for _ in range(3)]
    assert len(set(ids)) == 3
    assert all(answer.startswith("cmpl-mine-") for answer in ids)


def test_cache_salt_isolates_the_prefix_cache(server):
    prompt = "salted prompt with some blocks"

    def cached(**body) -> int:
        return complete(server, prompt=prompt, **body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") > 0
    assert cached(cache_salt="two") == 0


def test_response_format_and_structured_outputs_exclude_each_other(server):
    body = {"prompt": "a", "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a+"}}
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"


CLIENT_REQUESTS = {
    "vllm bench serve": {
        "repetition_penalty": 1.0,
        "logprobs": None,
        "temperature": 0.0,
        "ignore_eos": False,
    },
    "sglang bench_serving": {"temperature": 0.0, "best_of": 1, "ignore_eos": False},
    "guidellm": {
        "stop": None,
        "ignore_eos": False,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "openai with everything neutral": {
        "best_of": 1,
        "echo": False,
        "frequency_penalty": 0,
        "logit_bias": {},
        "n": 1,
        "presence_penalty": 0,
        "stop": [],
        "suffix": None,
        "temperature": 1,
        "top_p": 1,
        "user": "",
    },
}


@pytest.mark.parametrize("name", CLIENT_REQUESTS)
def test_requests_of_known_clients(server, name):
    body = {"model": "test", "prompt": "a", "max_tokens": 32, "stream": True, **CLIENT_REQUESTS[name]}
    body.setdefault("stream_options", {"include_usage": True})
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    folded = fold_completion(sse_events(response))
    assert folded.choices[0].text == "four"
    assert folded.usage is not None


@pytest.mark.feature("structured output", "n > 1")
def test_forms_of_the_answer():
    """``response_format`` and ``structured_outputs`` hold in streams, for every choice, with log-probabilities."""
    settings = engines.config(num_blocks=256)
    engine = engines.scripted(
        engines.uniform_script(), settings, tokenizer=ByteTokenizer(), max_model_len=512
    )
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    with running_server(engine) as server:
        body = {"prompt": "a", "max_tokens": 400, "seed": 1, "logprobs": 0}
        by_regex = same_both_ways(server, **body, n=2, structured_outputs={"regex": "[ab]{3}c"})
        for choice in by_regex["choices"]:
            assert re.fullmatch("[ab]{3}c", choice["text"])
            assert choice["finish_reason"] == "stop"
        chosen = complete(server, **body, structured_outputs={"choice": ["yes", "no"]})
        assert chosen["choices"][0]["text"] in ("yes", "no")
        named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        text = complete(server, **body, response_format=named)["choices"][0]["text"]
        assert json.loads(text)["a"] in (1, 2)
        for wrong in ({"regex": "[ab"}, {"json": "{"}, {"grammar": "nonsense"}):
            response = server.client.post("/v1/completions", json={**body, "structured_outputs": wrong})
            assert response.status_code == 400, response.text
            assert "structured_outputs" in response.json()["error"]["message"]


def test_api_01_a_request_that_runs_alongside_is_not_disturbed():
    engine = engines.scripted(slow(say(list(b"long answer")), 0.01), tokenizer=ByteTokenizer())
    with running_server(engine) as server, ThreadPoolExecutor(1) as pool:
        long = pool.submit(complete, server, prompt="a")
        while not long.done():
            response = server.client.post("/v1/completions", json={"prompt": ["a", ""]})
            assert response.status_code == 400
        assert long.result()["choices"][0]["text"] == "long answer"
        assert_idle(server)


def test_model_defaults_come_after_the_request():
    """Request, then ``generation_config.json``, then OpenAI's defaults."""
    engine = engines.scripted(engines.uniform_script(), tokenizer=ByteTokenizer())
    engine = replace(engine, sampling_defaults={"top_k": 1})
    with running_server(engine) as server:
        greedy = {
            complete(server, prompt="a", max_tokens=8, ignore_eos=True)["choices"][0]["text"]
            for _ in range(3)
        }
        assert len(greedy) == 1
        free = {complete(server, prompt="a", max_tokens=8, top_k=0)["choices"][0]["text"] for _ in range(3)}
        assert len(free) == 3


def test_without_a_tokenizer_token_ids_are_served():
    with running_server(engines.scripted(say(list(b"four")))) as server:
        refused = server.client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt"
        answer = complete(server, prompt=[1, 2], return_token_ids=True, logprobs=1, echo=True)
        assert answer["choices"][0]["token_ids"] == list(b"four")
        assert server.client.post("/tokenize", json={"prompt": "a"}).status_code == 400
        assert server.client.get("/tokenizer_info").status_code == 400


def test_streams_are_event_streams(server):
    with server.client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert "content-length" not in response.headers
        assert response.read().endswith(b"data: [DONE]\n\n")


def test_errors_before_the_stream_are_http_errors(server):
    response: httpx.Response = server.client.post("/v1/completions", json={"prompt": "", "stream": True})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
