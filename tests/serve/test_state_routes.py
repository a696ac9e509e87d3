"""Routes about the server itself: models, tokens, health, load, cache, profiles, and the OpenAPI document."""

import json
import time
from dataclasses import replace

import pytest

from jaxinfer.tokenization.chat import ChatTemplate
from tests.support import engines
from tests.support.parrot import parrot_engine
from tests.support.scripts import endless, say, slow
from tests.support.servers import running_server
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("http")


@pytest.fixture(scope="module")
def server():
    with running_server(parrot_engine(), served_model_names=("parrot", "org/other")) as running:
        yield running


def test_models(server):
    listed = server.client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["parrot", "org/other"]
    for model in listed["data"]:
        assert model["object"] == "model"
        assert model["max_model_len"] == 2048
        assert model["root"] == "parrot"
        assert abs(model["created"] - time.time()) < 600
        assert server.client.get(f"/v1/models/{model['id']}").json() == model
    assert server.client.get("/v1/models/none").status_code == 404


def test_tokenize_and_back(server):
    answer = server.client.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert answer["tokens"] == list("héllo".encode())
    assert answer["count"] == 6
    assert answer["max_model_len"] == 2048
    assert len(answer["token_strs"]) == 6
    assert "token_strs" not in server.client.post("/tokenize", json={"prompt": "a"}).json()
    assert server.client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "héllo"}
    shown = server.client.post("/detokenize", json={"tokens": [256, 97]}).json()["prompt"]
    assert shown == "<|bos|>a"
    hidden = server.client.post("/detokenize", json={"tokens": [256, 97], "skip_special_tokens": True})
    assert hidden.json()["prompt"] == "a"


def test_tokenize_large_texts_and_empty_ones(server):
    large = server.client.post("/tokenize", json={"prompt": "x" * 1_000_000}).json()
    assert large["count"] == 1_000_000
    assert server.client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert server.client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_tokenize_a_conversation_as_chat_completions_do(server):
    messages = [{"role": "user", "content": "hi"}]
    answer = server.client.post("/tokenize", json={"messages": messages}).json()
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    chat = server.client.post("/v1/chat/completions", json=body).json()
    assert answer["tokens"] == chat["prompt_token_ids"]
    without = server.client.post(
        "/tokenize", json={"messages": messages, "add_generation_prompt": False}
    ).json()
    assert 0 < without["count"] < answer["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, None),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "nope": 1}, "nope"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
def test_token_routes_refuse(server, path, body, param):
    response = server.client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_tokenizer_info(server):
    info = server.client.get("/tokenizer_info").json()
    assert info["vocab_size"] == info["model_vocab_size"] == 320
    assert info["eos_token_ids"] == [257, 258]
    assert info["bos_token"] == "<|bos|>"
    assert "messages" in info["chat_template"]


def test_health_version_and_load(server):
    for path in ("/health", "/ready"):
        assert server.client.get(path).json() == {"status": "ok"}
    assert server.client.get("/version").json()["version"]
    assert server.client.get("/load").json() == {
        "server_load": 0,
        "running": 0,
        "waiting": 0,
        "waiting_tokens": 0,
        "kv_cache_usage": 0.0,
    }
    assert server.client.get("/metrics").headers["content-type"].startswith("text/plain")


def test_load_counts_what_runs_and_waits():
    settings = engines.config(max_num_seqs=2)
    engine = engines.scripted(slow(endless(), 0.02), settings, tokenizer=ByteTokenizer())
    with running_server(engine) as server:
        server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        body = {"prompt": "abc", "n": 3, "max_tokens": 60, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_raw())
            load = server.client.get("/load").json()
        assert load["server_load"] == 3
        assert (load["running"], load["waiting"]) == (2, 1)
        assert load["kv_cache_usage"] > 0


def test_reset_prefix_cache():
    engine = engines.scripted(say(list(b"ok")), tokenizer=ByteTokenizer())
    with running_server(engine) as server:
        body = {"prompt": "a prompt of some blocks"}

        def cached() -> int:
            usage = server.client.post("/v1/completions", json=body).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert cached() == 0
        assert cached() > 0
        assert server.client.post("/reset_prefix_cache").json()["blocks"] > 0
        assert cached() == 0
        assert server.client.get("/reset_prefix_cache").status_code == 405


def test_profiles(tmp_path):
    engine = engines.scripted(say(list(b"ok")), tokenizer=ByteTokenizer())
    with running_server(engine, profile_directory=str(tmp_path)) as server:
        assert server.client.post("/stop_profile").status_code == 409
        started = server.client.post("/start_profile")
        assert started.json() == {"directory": str(tmp_path)}
        second = server.client.post("/start_profile")
        assert second.status_code == 409
        assert second.json()["error"]["type"] == "conflict_error"
        assert server.client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert server.client.post("/stop_profile").status_code == 200
        assert any(path.is_file() for path in tmp_path.rglob("*"))
    with running_server(engines.scripted(say([]), tokenizer=ByteTokenizer())) as server:
        off = server.client.post("/start_profile")
        assert off.status_code == 404
        assert "profile_directory" in off.json()["error"]["message"]


def test_served_name_comes_from_the_reference():
    engine = engines.scripted(say(list(b"ok")), tokenizer=ByteTokenizer())
    for reference, name in {
        "hf:org/model": "org/model",
        "/models/tiny-1b/": "tiny-1b",
        "package:somewhere/tiny.gguf": "tiny.gguf",
    }.items():
        model = engine.config.model.model_copy(update={"reference": reference})
        named = replace(engine, config=engine.config.model_copy(update={"model": model}))
        with running_server(named) as server:
            assert [model["id"] for model in server.client.get("/v1/models").json()["data"]] == [name]


def test_model_without_a_chat_template():
    engine = replace(engines.scripted(say([]), tokenizer=ByteTokenizer()), chat_template=ChatTemplate({}))
    with running_server(engine) as server:
        response = server.client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})
        assert response.status_code == 400
        assert "template" in response.json()["error"]["message"]
        assert server.client.get("/tokenizer_info").json()["chat_template"] is None


def test_openapi_document_is_whole(server):
    """Every reference has a target, every operation documents its errors, and there is no 422."""
    document = server.client.get("/openapi.json").json()
    text = json.dumps(document)
    schemas = document["components"]["schemas"]
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.split('"')[0] in schemas
    assert "x-definitions" not in text
    assert "422" not in text
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], path
            assert "200" in operation["responses"], path
            if method == "post" and "requestBody" in operation:
                assert {"400", "401", "413"} <= set(operation["responses"]), path
    assert {"/v1/completions", "/v1/models", "/tokenize", "/health", "/metrics"} <= set(document["paths"])
    fields = schemas["CompletionRequest"]["properties"]
    assert {"prompt", "temperature", "structured_outputs", "stream_interval"} <= set(fields)
