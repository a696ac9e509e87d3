"""``/v1/responses`` over a real socket: items, events in their order, and what is refused."""

import json
from typing import Any

import pytest

from tests.support.parrot import parrot_engine
from tests.support.servers import Server, running_server

pytestmark = pytest.mark.feature("http", "responses")

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
    }
]


@pytest.fixture(scope="module")
def server():
    with running_server(parrot_engine(), tool_parser="hermes", reasoning_parser="think") as running:
        yield running


def ask(server: Server, said: Any, **fields) -> dict:
    response = server.client.post("/v1/responses", json={"input": said, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: Server, said: Any, **fields) -> list[dict]:
    """The events; checks that names and types agree, numbers count up, and nothing follows the last one."""
    response = server.client.post("/v1/responses", json={"input": said, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "[DONE]" not in response.text
    return events


def kinds(events: list[dict]) -> list[str]:
    """Types without the common prefix; equal neighbours once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]


def without_ids(response: dict) -> dict:
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    varying = ("id", "created_at", "completed_at")
    usage = {**response["usage"], "input_tokens_details": None}
    return {**{k: v for k, v in response.items() if k not in varying}, "output": items, "usage": usage}


TEXT = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
REASONING = [name.replace("output_text", "reasoning_text") for name in TEXT]
FUNCTION = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]


@pytest.mark.parametrize(
    ("said", "fields", "expected"),
    [
        ("hello", {}, TEXT),
        (CALL, {"tools": TOOLS}, FUNCTION),
        ("<think>hm</think>hello", {}, REASONING + TEXT),
        (f"<think>hm</think>hello {CALL}{CALL}", {"tools": TOOLS}, REASONING + TEXT + FUNCTION * 2),
    ],
    ids=["text", "call", "reasoning", "all"],
)
def test_order_of_events(server, said, fields, expected):
    events = stream(server, said, **fields)
    assert kinds(events) == ["created", "in_progress", *expected, "completed"]
    for event in events[:2]:
        assert event["response"]["status"] == "in_progress"
        assert event["response"]["output"] == []
    final = events[-1]["response"]
    assert without_ids(final) == without_ids(ask(server, said, **fields))
    check_items(events, final)


def check_items(events: list[dict], final: dict) -> None:
    """Deltas add up to the items, and every event names the item that it belongs to."""
    for index, item in enumerate(final["output"]):
        mine = [event for event in events if event.get("output_index") == index]
        assert mine[0]["item"]["id"] == item["id"]
        assert mine[0]["item"]["status"] == "in_progress"
        assert mine[-1]["item"] == item
        assert all(event["item_id"] == item["id"] for event in mine[1:-1])
        joined = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert joined == (item.get("arguments") or item["content"][0]["text"])


def test_items_of_an_answer(server):
    answer = ask(server, f"<think>hm</think>hello {CALL}", tools=TOOLS)
    reasoning, message, call = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert reasoning["summary"] == []
    assert message["role"] == "assistant"
    assert [part["text"].strip() for part in message["content"]] == ["hello"]
    assert message["content"][0]["annotations"] == []
    assert (call["name"], json.loads(call["arguments"])) == ("f", {"a": 1})
    assert call["call_id"] != call["id"]
    assert {item["status"] for item in answer["output"]} == {"completed"}
    assert answer["status"] == "completed"
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    assert (
        answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"]
    )


def test_the_length_limit_makes_a_response_incomplete(server):
    answer = ask(server, "hello", max_output_tokens=3)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["output"][0]["content"][0]["text"] == "hel"
    events = stream(server, "hello", max_output_tokens=3)
    assert kinds(events)[-1] == "incomplete"
    assert without_ids(events[-1]["response"]) == without_ids(answer)


def test_an_answer_without_text_is_an_empty_message(server):
    events = stream(server, [{"role": "user", "content": ""}])
    assert kinds(events) == ["created", "in_progress", *[k for k in TEXT if "delta" not in k], "completed"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_instructions_and_items_become_messages(server):
    """The model sees what the chat endpoint would show it for the same conversation."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "three"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "four"}]},
        {"role": "user", "content": "five"},
    ]
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for i, arguments in ((1, '{"a": 1}'), (2, "{}"))
    ]
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "three"},
        {"role": "tool", "tool_call_id": "c2", "content": "four"},
        {"role": "user", "content": "five"},
    ]
    answer = ask(server, items, instructions="be kind")
    chat = server.client.post("/v1/chat/completions", json={"messages": messages}).json()
    assert answer["output"][0]["content"][0]["text"] == "five"
    assert answer["instructions"] == "be kind"
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    again = ask(server, items, instructions="be kind")
    assert again["usage"]["input_tokens_details"]["cached_tokens"] == chat["usage"]["prompt_tokens"] - 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}], ids=str)
def test_tool_choice_forces_a_call(server, choice):
    said = "<think>hm</think><anything>"
    answer = ask(server, said, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    reasoning, call = answer["output"]
    assert reasoning["content"][0]["text"] == "hm"
    assert call["type"] == "function_call"
    assert json.loads(call["arguments"])["a"] in (1, 2)
    assert answer["tool_choice"] == choice


def test_text_format(server):
    form = {"type": "json_schema", "name": "x", "schema": {"enum": ["red", "green"]}, "strict": True}
    answer = ask(server, "<think>hm</think><anything>", text={"format": form})
    assert json.loads(answer["output"][1]["content"][0]["text"]) in ("red", "green")
    assert answer["text"]["format"] == form


def test_logprobs_of_text(server):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = ask(server, "ab", **fields)["output"][0]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["a", "b"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    deltas = [e for e in stream(server, "ab", **fields) if e["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
    assert ask(server, "ab")["output"][0]["content"][0]["logprobs"] == []


def test_what_clients_send_by_default_is_accepted(server):
    """Pinned: ``store`` is accepted, nothing is stored, and the answer says so."""
    harmless = {
        "store": True,
        "background": False,
        "previous_response_id": None,
        "truncation": "disabled",
        "service_tier": "auto",
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "user": "u",
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "auto",
    }
    answer = ask(server, "ok", **harmless)
    assert answer["store"] is False
    assert answer["metadata"] == {"a": "b"}
    assert answer["reasoning"] == {"effort": "low", "summary": None}


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("background", {"background": True}),
        ("conversation", {"conversation": "c"}),
        ("prompt", {"prompt": {"id": "p"}}),
        ("max_tool_calls", {"max_tool_calls": 1}),
        ("truncation", {"truncation": "auto"}),
        ("n", {"n": 2}),
        ("tools", {"tools": [{"type": "web_search"}]}),
        ("tool_choice", {"tool_choice": {"type": "web_search"}}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": {"type": "function", "name": "f"}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}),
        ("input", {"input": [{"type": "reasoning", "summary": []}]}),
        ("input", {"input": [{"type": ["message"], "role": "user", "content": "x"}]}),
        ("input", {"input": ["x"]}),
        ("input", {"input": []}),
        ("input", {"input": ""}),
        ("input", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("input", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        ("input", {"input": [{"role": "robot", "content": "x"}]}),
        ("input", {"input": [{"type": "function_call", "name": "f"}]}),
        ("text", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("top_logprobs", {"top_logprobs": 21}),
        ("include", {"include": ["file_search_call.results"]}),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(server, param, fields):
    response = server.client.post("/v1/responses", json={"input": "ok", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_api_08_a_failure_within_a_stream(server):
    """Pinned: the last event is ``response.failed``; there is no terminator. Before the first token it is a 500."""
    events = stream(server, "a" * 300 + "<fail>")
    assert kinds(events)[-1] == "failed"
    failed = events[-1]["response"]
    assert failed["status"] == "failed"
    assert "not finite" in failed["error"]["message"]
    for streaming in (False, True):
        response = server.client.post("/v1/responses", json={"input": "<fail>", "stream": streaming})
        assert response.status_code == 500
    assert ask(server, "ok")["status"] == "completed"
