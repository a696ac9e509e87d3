"""Calls that a request forces, forbids or cuts, through ``/v1/chat/completions`` (CHT-02)."""

import json

import jsonschema
import pytest

from tests.support.parrot import parrot_engine
from tests.support.servers import Server, fold_chat, running_server, sse_events

pytestmark = pytest.mark.feature("http", "chat", "tools")

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "does it", "parameters": PARAMETERS}}
    for name in ("f", "g")
]
NAMED = {"type": "function", "function": {"name": "g"}}


def call(name: str = "f", arguments: str = '{"a": 1, "b": "x"}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PLAIN, ONE, BROKEN = (
    "no call",
    f"I do. {call()}",
    '<tool_call>\n{"name": "f", "arguments": {"a": \n</tool_call>',
)


@pytest.fixture(scope="module")
def server():
    with running_server(parrot_engine(), tool_parser="hermes", reasoning_parser="none") as running:
        yield running


@pytest.fixture(scope="module")
def plain_server():
    """The same model, but nobody looks for calls."""
    with running_server(parrot_engine(), tool_parser="none", reasoning_parser="none") as running:
        yield running


def both(server: Server, said: str, **fields) -> list[dict]:
    """The choices of an answer; checks that a stream adds up to the same, if the model always says the same."""
    body = {"messages": [{"role": "user", "content": said}], "tools": TOOLS, **fields}
    response = server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    whole = [read(choice) for choice in response.json()["choices"]]
    folded = fold_chat(sse_events(server.client.post("/v1/chat/completions", json={**body, "stream": True})))
    assert folded.done
    assert folded.error is None
    streamed = [
        {
            "content": choice.text,
            "calls": [(c["name"], c["arguments"]) for c in choice.tool_calls.values()],
            "indices": list(choice.tool_calls),
            "ids": [c["id"] for c in choice.tool_calls.values()],
            "finish": choice.finish_reason,
        }
        for _, choice in sorted(folded.choices.items())
    ]
    for choice in (*whole, *streamed):
        check(choice)
    if fields.get("tool_choice", "auto") in ("auto", "none"):
        assert [without_ids(c) for c in whole] == [without_ids(c) for c in streamed]
    else:
        assert [c["finish"] for c in whole] == [c["finish"] for c in streamed]
    return whole


def read(choice: dict) -> dict:
    calls = choice["message"].get("tool_calls", [])
    return {
        "content": choice["message"]["content"] or "",
        "calls": [(c["function"]["name"], c["function"]["arguments"]) for c in calls],
        "indices": list(range(len(calls))),
        "ids": [c["id"] for c in calls],
        "finish": choice["finish_reason"],
    }


def check(choice: dict) -> None:
    """What holds for every answer: ids differ, indices count up, and the finish reason promises what is there."""
    assert len(set(choice["ids"])) == len(choice["ids"])
    assert all(choice["ids"])
    assert choice["indices"] == list(range(len(choice["calls"])))
    if choice["finish"] == "tool_calls":
        assert choice["calls"]
        for _, arguments in choice["calls"]:
            assert isinstance(json.loads(arguments), dict)


def without_ids(choice: dict) -> dict:
    return {**choice, "ids": len(choice["ids"])}


@pytest.mark.parametrize("choice", ["auto", "none", "required", NAMED], ids=str)
def test_cht_02_the_length_limit_wins(server, choice):
    """A call that the limit cut, and a complete one that the limit follows."""
    said = ONE if choice in ("auto", "none") else "<anything>"
    tokens = 24 if choice in ("auto", "none") else 4
    (answer,) = both(server, said, tool_choice=choice, max_tokens=tokens)
    assert answer["finish"] == "length"
    if choice == "auto":
        (answer,) = both(server, f"{call()} and so on and on", max_tokens=60)
        assert answer["finish"] == "length"
        assert [name for name, _ in answer["calls"]] == ["f"]


@pytest.mark.parametrize("said", [PLAIN, ONE, BROKEN, "<anything>"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
def test_cht_02_forced_calls_fit_their_schema(server, said, choice):
    """Whatever the model wants to say. Pinned, as OpenAI documents: ``stop`` for a named function."""
    (answer,) = both(server, said, tool_choice=choice, parallel_tool_calls=False)
    assert answer["finish"] == ("tool_calls" if choice == "required" else "stop")
    ((name, arguments),) = answer["calls"]
    assert name in (("f", "g") if choice == "required" else ("g",))
    jsonschema.validate(json.loads(arguments), PARAMETERS)
    assert answer["content"] == ""


@pytest.mark.parametrize("said", [PLAIN, ONE, BROKEN])
def test_cht_02_without_a_parser(plain_server, said):
    """Nobody looks for calls, so there are none, and a call cannot be forced."""
    for choice in ("auto", "none"):
        (answer,) = both(plain_server, said, tool_choice=choice)
        assert (answer["content"], answer["calls"], answer["finish"]) == (said, [], "stop")
    for choice in ("required", NAMED):
        body = {"messages": [{"role": "user", "content": said}], "tools": TOOLS, "tool_choice": choice}
        response = plain_server.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}},
        {"tool_choice": "required"},
        {"tool_choice": NAMED},
        {"tools": [], "tool_choice": "required"},
    ],
    ids=str,
)
@pytest.mark.parametrize("streaming", [False, True])
def test_cht_02_choices_that_cannot_be_kept_are_refused(server, fields, streaming):
    body = {"messages": [{"role": "user", "content": "x"}], "stream": streaming, **fields}
    response = server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("tools", "tool_choice")
