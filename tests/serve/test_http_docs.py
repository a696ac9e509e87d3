"""``docs/http_api.md`` names every field, and its examples are served."""

import json
import re
from pathlib import Path

import pytest

from serve.errors import TYPES
from serve.protocol.completions import CompletionRequest
from tests.support import engines
from tests.support.scripts import say
from tests.support.servers import running_server
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("http", "completions")

PAGE = (Path(__file__).parents[2] / "docs" / "http_api.md").read_text()


def test_every_field_is_documented_and_no_other():
    rows = [line for line in PAGE.split("## Completions")[1].splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    assert named == set(CompletionRequest.model_fields)


def test_error_types_are_those_of_the_code():
    for statuses, kind in re.findall(r"^\| ([\d, ]+) \| `(\w+)` \|", PAGE, re.MULTILINE):
        for status in statuses.split(", "):
            assert TYPES[int(status)] == kind


def test_examples_are_served():
    examples = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
    assert examples
    with running_server(engines.scripted(say(list(b"ok")), tokenizer=ByteTokenizer())) as server:
        for body in examples:
            response = server.client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
        paths = server.client.get("/openapi.json").json()["paths"]
    for method, path in re.findall(r"`(GET|POST) (/[\w/{}]+)`", PAGE):
        known = {re.sub(r"\{.*?\}", "{name}", name): operations for name, operations in paths.items()}
        if path != "/openapi.json":
            assert method.lower() in known[path], path
