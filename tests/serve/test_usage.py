"""Token counts of streams and whole answers (API-04)."""

import pytest

from tests.support import engines
from tests.support.scripts import say
from tests.support.servers import Server, fold_completion, running_server, sse_events
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("http", "completions", "streaming")

EMOJI = "\U0001f600"
CASES = {
    "eos": {"prompt": "a"},
    "length": {"prompt": "a", "max_tokens": 3},
    "stop string": {"prompt": "a", "stop": "o w"},
    "stop token": {"prompt": "a", "stop_token_ids": [ord("w")]},
    "three choices": {"prompt": "abcde", "n": 3},
    "prompts": {"prompt": ["abc", "de"], "n": 2},
    "characters of several tokens": {"prompt": EMOJI},
    "prefix hit": {"prompt": "a prompt that the cache knows"},
    "scoring": {"prompt": "abc", "echo": True, "max_tokens": 0},
}


@pytest.fixture(scope="module")
def server():
    text = f"hello {EMOJI} world".encode()
    engine = engines.scripted(say(list(text)), tokenizer=ByteTokenizer())
    with running_server(engine) as running:
        yield running


def events(server: Server, **body) -> list:
    response = server.client.post("/v1/completions", json={"max_tokens": 32, **body, "stream": True})
    assert response.status_code == 200, response.text
    return sse_events(response)


@pytest.mark.parametrize(
    "options",
    [{}, {"stream_options": None}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}],
)
def test_api_04_no_usage_unless_asked_for(server, options):
    for event in events(server, prompt="a", **options)[:-1]:
        assert "usage" not in event
        assert event["choices"]


@pytest.mark.parametrize("case", CASES)
def test_api_04_usage_in_streams(server, case):
    """One chunk with usage and without choices, the last before [DONE]; its numbers are those of the whole answer.
    Tokens that ended a choice and are not in its text do not count."""
    body = {"max_tokens": 32, **CASES[case]}
    server.client.post("/v1/completions", json=body)  # now both runs below find the same prefix
    whole = server.client.post("/v1/completions", json=body).json()["usage"]
    chunks = events(server, **body, stream_options={"include_usage": True})
    assert chunks[-1] == "[DONE]"
    assert [chunk["choices"] == [] for chunk in chunks[:-1]] == [False] * (len(chunks) - 2) + [True]
    assert all("usage" not in chunk for chunk in chunks[:-2])
    assert chunks[-2]["usage"] == whole
    assert whole["prompt_tokens"] + whole["completion_tokens"] == whole["total_tokens"]
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    assert whole["prompt_tokens"] == sum(len(prompt.encode()) for prompt in prompts)
    cached = whole["prompt_tokens_details"]["cached_tokens"]
    assert cached <= whole["prompt_tokens"] - len(prompts)
    if case == "prefix hit":
        assert cached > 0


@pytest.mark.parametrize("interval", [1, 4])
def test_api_04_counts_are_of_tokens_not_of_chunks(server, interval):
    chunks = events(
        server,
        prompt="a",
        return_token_ids=True,
        stream_interval=interval,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    folded = fold_completion(chunks)
    so_far = 0
    for chunk in chunks[:-2]:
        so_far += len(chunk["choices"][0]["token_ids"])
        assert chunk["usage"]["completion_tokens"] == so_far
        assert chunk["usage"]["prompt_tokens"] == 1
    assert folded.usage is not None
    assert folded.usage["completion_tokens"] == so_far == len(f"hello {EMOJI} world".encode())


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"include_usage": False}])
def test_api_04_stream_options_without_stream_are_400(server, options):
    """Pinned: refused, as OpenAI does; null is the same as absent."""
    response = server.client.post("/v1/completions", json={"prompt": "a", "stream_options": options})
    assert response.status_code == 400
    assert "stream_options" in response.json()["error"]["message"]
    assert (
        server.client.post("/v1/completions", json={"prompt": "a", "stream_options": None}).status_code == 200
    )


def test_continuous_usage_needs_usage(server):
    body = {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert "include_usage" in response.json()["error"]["message"]


def test_usage_can_be_forced_by_the_server():
    engine = engines.scripted(say(list(b"ok")), tokenizer=ByteTokenizer())
    with running_server(engine, force_include_usage=True) as server:
        folded = fold_completion(events(server, prompt="a"))
        assert folded.usage is not None
        assert folded.usage["completion_tokens"] == 2
