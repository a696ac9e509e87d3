"""``/v1/embeddings`` over a real socket, on a real small model."""

import base64

import numpy as np
import pytest

from tests.support.servers import Server, running_server
from tests.support.tiny_models import tiny_model
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("http", "embeddings")

DIMENSIONS = 64


@pytest.fixture(scope="module")
def server():
    with running_server(tiny_model().engine(tokenizer=ByteTokenizer()), max_prompts=8) as running:
        yield running


def embed(server: Server, given, **fields) -> np.ndarray:
    """Vectors [X, D]."""
    response = server.client.post("/v1/embeddings", json={"input": given, **fields})
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return np.array([item["embedding"] for item in data])


@pytest.mark.parametrize("given", ["abc", ["abc"], [97, 98, 99], [[97, 98, 99]]], ids=str)
def test_forms_of_the_input(server, given):
    vectors = embed(server, given)
    assert vectors.shape == (1, DIMENSIONS)
    assert vectors == pytest.approx(embed(server, "abc"), abs=1e-5)


def test_vectors_have_length_one_and_keep_their_order(server):
    texts = ["abc", "xyz and more", "q"]
    vectors = embed(server, texts)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    for vector, text in zip(vectors, texts):
        assert vector == pytest.approx(embed(server, text)[0], abs=1e-4)


def test_pooling(server):
    """The mean is the default. One token has only one state, whichever way it is pooled."""
    assert embed(server, "abc") == pytest.approx(embed(server, "abc", pooling="mean"), abs=1e-5)
    assert not np.allclose(embed(server, "abc"), embed(server, "abc", pooling="last"), atol=1e-3)
    assert embed(server, "a") == pytest.approx(embed(server, "a", pooling="last"), abs=1e-5)


def test_base64_is_little_endian_float32(server):
    response = server.client.post("/v1/embeddings", json={"input": "abc", "encoding_format": "base64"})
    vector = np.frombuffer(base64.b64decode(response.json()["data"][0]["embedding"]), "<f4")
    assert vector == pytest.approx(embed(server, "abc")[0], abs=1e-6)


def test_usage(server):
    usage = server.client.post("/v1/embeddings", json={"input": ["abc", "de"]}).json()["usage"]
    assert usage == {"prompt_tokens": 5, "total_tokens": 5}


def test_a_prompt_as_long_as_the_context(server):
    """Nothing is generated, so no room is needed for it."""
    assert embed(server, "x" * 64).shape == (1, DIMENSIONS)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("input", {"input": []}),
        ("input", {"input": 5}),
        ("input", {"input": ["a", 1]}),
        ("input", {"input": ["a"] * 9}),
        ("prompt", {"input": ""}),
        ("prompt", {"input": [320]}),
        ("prompt", {"input": "x" * 65}),
        ("dimensions", {"dimensions": 32}),
        ("dimensions", {"dimensions": 0}),
        ("encoding_format", {"encoding_format": "hex"}),
        ("pooling", {"pooling": "max"}),
        ("temperature", {"temperature": 1}),
    ],
    ids=str,
)
def test_what_is_refused_is_named(server, param, fields):
    response = server.client.post("/v1/embeddings", json={"input": "ab", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert embed(server, "ab", dimensions=DIMENSIONS).shape == (1, DIMENSIONS)
