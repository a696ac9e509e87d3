"""What every endpoint does with calls that are wrong before a model is asked: keys, sizes, methods, JSON, fields."""

import socket
import time

import httpx
import pytest

from tests.support import engines
from tests.support.scripts import say
from tests.support.servers import Server, running_server
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("http")

MAX_BODY = 100_000


@pytest.fixture(scope="module")
def server():
    engine = engines.scripted(say(list(b"ok")), tokenizer=ByteTokenizer())
    with running_server(
        engine,
        api_keys=("secret", "sécret"),
        cors_origins=("https://app.example",),
        max_body_bytes=MAX_BODY,
        served_model_names=("tiny", "alias"),
    ) as running:
        running.client.headers["authorization"] = "Bearer secret"
        yield running


def post(server: Server, path: str = "/v1/completions", **arguments) -> httpx.Response:
    return server.client.post(path, **arguments)


def assert_error(response: httpx.Response, status: int, param: str | None = None) -> str:
    """The answer is an OpenAI error object; returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["param"] == param
    assert error["message"]
    return error["message"]


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/completions", "/tokenize", "/load", "/reset_prefix_cache", "/v1/x"]
)
@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer", "secret", "Basic secret", "Bearer secret2"]
)
def test_wrong_keys_are_401_with_the_error_object(server, path, header):
    headers = {} if header is None else {"authorization": header}
    response = httpx.post(server.url + path, headers=headers, json={"prompt": "a"})
    assert_error(response, 401)
    assert response.json()["error"]["type"] == "authentication_error"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version", "/openapi.json"])
def test_probes_need_no_key(server, path):
    assert httpx.get(server.url + path).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_load_balancers_may_ask_with_head(server, path):
    answer = httpx.head(server.url + path)
    assert answer.status_code == 200
    assert answer.content == b""


def test_any_of_the_keys_opens(server):
    for key in ("secret", "sécret"):
        headers = [(b"authorization", f"bearer {key}".encode())]
        response = httpx.get(server.url + "/v1/models", headers=headers)
        assert response.status_code == 200, key


def test_declared_length_over_the_limit_is_413_before_the_body_is_sent(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
        raw.sendall(f"{head}Content-Length: {10**9}\r\nContent-Type: application/json\r\n\r\n".encode())
        answer = _read_all(raw)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"code":413' in answer


def test_chunked_body_over_the_limit_is_413_without_reading_all(server):
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
        raw.sendall(f"{head}Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        try:
            for _ in range(100 * MAX_BODY // 10_000):
                raw.sendall(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
                sent += 10_000
                time.sleep(0.001)
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert sent < 50 * MAX_BODY, "the server read on"
    chunks = (b"x" * 10_000 for _ in range(MAX_BODY // 10_000 + 1))
    response = post(server, content=chunks, headers={"content-type": "application/json"})
    assert_error(response, 413)


def test_body_of_exactly_the_limit_is_served(server):
    body = b'{"prompt":"a","max_tokens":1,"user":"%s"}'
    body = body % (b"u" * (MAX_BODY - len(body) + 2))
    assert len(body) == MAX_BODY
    assert post(server, content=body, headers={"content-type": "application/json"}).status_code == 200


def test_unknown_path_and_wrong_method(server):
    assert_error(server.client.get("/v1/nope"), 404)
    response = server.client.get("/v1/completions")
    assert_error(response, 405)
    assert response.headers["allow"] == "POST"
    assert_error(server.client.put("/v1/models"), 405)


def test_unknown_model_is_404(server):
    message = assert_error(post(server, json={"model": "gpt-9", "prompt": "a"}), 404, "model")
    assert "gpt-9" in message
    assert "tiny" in message
    assert_error(server.client.get("/v1/models/org/none"), 404, "model")
    for name in ("tiny", "alias"):
        assert post(server, json={"model": name, "prompt": "a"}).json()["model"] == name
        assert server.client.get(f"/v1/models/{name}").json()["id"] == name


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_other_content_types_are_400(server, kind):
    message = assert_error(post(server, content=b'{"prompt":"a"}', headers={"content-type": kind}), 400)
    assert "application/json" in message


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"prompt": NaN}', b'"text"', b"[]", b"null", b'{"prompt":"\xff"}', b"1e999"]
)
def test_bodies_that_are_no_json_object_are_400(server, body):
    assert_error(post(server, content=body, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize(
    "body", [b"[" * 90_000, b'{"prompt":' + b"[" * 40_000 + b"]" * 40_000 + b"}", b'{"a":' * 15_000]
)
def test_api_03_deep_nesting_is_400_at_once(server, body):
    start = time.monotonic()
    assert_error(post(server, content=body, headers={"content-type": "application/json"}), 400)
    assert time.monotonic() - start < 1


def test_half_surrogate_pairs_become_replacement_characters(server):
    """JSON can spell half an emoji, text cannot: a client that cut its text there is served all the same."""
    body = b'{"prompt":["a\\ud83d","\\ud83d\\ude00"],"echo":true,"max_tokens":1,"stop":["\\udc00"]}'
    response = post(server, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    assert [choice["text"] for choice in response.json()["choices"]] == ["a\ufffdo", "\U0001f600o"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", 5.0),
        ("max_tokens", True),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", 2.5),
        ("temperature", -0.1),
        ("top_p", 1.1),
        ("top_k", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("n", 0),
        ("n", "2"),
        ("n", False),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", "1"),
        ("seed", 1.0),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a", 1]),
        ("stop_token_ids", [320]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"320": 1}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("prompt_logprobs", 21),
        ("logprob_token_ids", [320]),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("min_tokens", 17),
        ("echo", "yes"),
        ("echo", 1),
        ("stream", "true"),
        ("suffix", "x"),
        ("best_of", 5_000_000),
        ("use_beam_search", True),
        ("length_penalty", 2.0),
        ("cache_salt", ""),
        ("cache_salt", "a/b"),
        ("cache_salt", "x" * 129),
        ("request_id", ""),
        ("priority", "high"),
        ("priority", 2**70),
        ("stream_interval", 0),
        ("truncate_prompt_tokens", -2),
        ("truncation_side", "middle"),
        ("guided_json", {}),
        ("prompt_embeds", "x"),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {"unknown": 1}),
        ("stream_options", {"include_usage": 1}),
    ],
)
def test_wrong_fields_are_400_and_named(server, field, value):
    response = post(server, json={"prompt": "a", "max_tokens": 4, **({field: value})})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "suffix": None},
        {"stop": None, "logprobs": None, "stream_options": None, "seed": None, "logit_bias": None, "n": None},
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "ignore_eos": False},
        {"seed": -1},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"stop": ["a", "b", "c", "d"]},
        {"stop_token_ids": [319], "logit_bias": {"319": 1}},
        {"response_format": {"type": "text"}},
        {"max_tokens": None},
    ],
)
def test_what_clients_send_by_default_is_accepted(server, fields):
    response = post(server, json={"prompt": "a", **fields})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == "ok"


def test_request_id_is_echoed_or_made(server):
    response = server.client.get("/v1/models", headers={"x-request-id": "abc-123 ü".encode()})
    assert response.headers["x-request-id"] == "abc-123 ü"
    ids = {server.client.get("/nope").headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    unauthorized = httpx.get(server.url + "/v1/models", headers={"x-request-id": "mine"})
    assert unauthorized.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("value", [b"a\x01b", b"a\x7fb", b"a\tb", b"x" * 300])
def test_request_id_with_control_characters_is_400(server, value):
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw:
        raw.sendall(
            b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: " + value + b"\r\n\r\n"
        )
        answer = _read_all(raw)
    assert answer.startswith(b"HTTP/1.1 400")
    assert value not in answer


def test_cors_setting(server):
    preflight = {"origin": "https://app.example", "access-control-request-method": "POST"}
    allowed = httpx.options(server.url + "/v1/completions", headers=preflight)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    other = httpx.options(
        server.url + "/v1/completions", headers={**preflight, "origin": "https://evil.example"}
    )
    assert "access-control-allow-origin" not in other.headers
    refused = httpx.get(server.url + "/v1/models", headers={"origin": "https://app.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"


def test_answers_on_one_connection_after_errors(server):
    """An error does not leave the connection in a state that spoils the next call."""
    for _ in range(3):
        assert_error(post(server, json={"prompt": "a", "nope": 1}), 400, "nope")
        assert post(server, json={"prompt": "a"}).status_code == 200


def _read_all(raw: socket.socket) -> bytes:
    data = b""
    while part := raw.recv(65536):
        data += part
    return data
