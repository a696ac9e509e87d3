"""Forms of chat answers, and budgets of their reasoning, through HTTP."""

import json
import re

import jsonschema
import pytest

from tests.support.parrot import parrot_engine
from tests.support.servers import Server, fold_chat, running_server, sse_events

pytestmark = pytest.mark.feature("http", "chat", "structured output")

ANYTHING = "<anything>"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Zo\u00eb", "\u674e"]}, "sizes": {"$ref": "#/$defs/sizes"}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
    "$defs": {
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3}
    },
}


@pytest.fixture(scope="module")
def server():
    with running_server(parrot_engine(), tool_parser="hermes", reasoning_parser="none") as running:
        yield running


@pytest.fixture(scope="module")
def thinker():
    with running_server(parrot_engine(), reasoning_parser="think") as running:
        yield running


def ask(server: Server, said: str, **fields) -> list[str]:
    """Texts of the choices of an answer, and of a stream."""
    body = {"messages": [{"role": "user", "content": said}], **fields}
    response = server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    folded = fold_chat(sse_events(server.client.post("/v1/chat/completions", json={**body, "stream": True})))
    assert folded.error is None
    texts = [choice["message"]["content"] for choice in response.json()["choices"]]
    return texts + [choice.text for choice in folded.choices.values()]


def schema_format(schema: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    "fields", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}, {"seed": 5}], ids=str
)
def test_a_schema_holds_whatever_the_model_wants(server, fields):
    for said in (ANYTHING, "no JSON at all"):
        for text in ask(server, said, response_format=schema_format(SCHEMA), **fields):
            jsonschema.validate(json.loads(text), SCHEMA)


def test_json_objects(server):
    for text in ask(server, '{"a": [1, {"b": null}]} and more', response_format={"type": "json_object"}):
        assert json.loads(text) == {"a": [1, {"b": None}]}


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "a" ("b" | "c")'}, "a[bc]"),
        ({"json": {"enum": ["x", 1]}}, '"x"|1'),
    ],
    ids=str,
)
def test_structured_outputs(server, form, pattern):
    for text in ask(server, ANYTHING, structured_outputs=form):
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": schema_format({"type": "object", "uniqueKeys": True, "$ref": "http://x/y"})},
        {"response_format": schema_format({"type": "unknown"})},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"json_object": False}},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    ],
    ids=str,
)
def test_forms_that_cannot_be_kept_are_refused(server, fields):
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    for stream in (False, True):
        response = server.client.post("/v1/chat/completions", json={**body, "stream": stream})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"]


def test_text_is_no_form(server):
    assert ask(server, "hello", response_format={"type": "text"}) == ["hello"] * 2


# ---- reasoning


def reasoning(server: Server, said: str, **fields) -> dict:
    body = {"messages": [{"role": "user", "content": said}], **fields}
    response = server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_form_holds_for_what_follows_the_reasoning(thinker):
    answer = reasoning(thinker, f"<think>free text</think>{ANYTHING}", response_format=schema_format(SCHEMA))
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "free text"
    jsonschema.validate(json.loads(message["content"]), SCHEMA)


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_thinking_token_budget(thinker, budget):
    """At most so many tokens between the marks; then the end is forced, and the answer follows."""
    said = "<think>" + "a" * 40 + "</think>" + "b" * 60
    answer = reasoning(thinker, said, thinking_token_budget=budget)
    message = answer["choices"][0]["message"]
    assert len(message.get("reasoning_content", "")) <= budget
    assert message["content"].endswith("b")


def test_a_large_budget_changes_nothing(thinker):
    said = "<think>abc</think>d"
    for budget in (-1, 100):
        message = reasoning(thinker, said, thinking_token_budget=budget)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("abc", "d")
