"""Formats of calls, histories with calls, and templates that refuse, through ``/v1/chat/completions``."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import pytest

from jaxinfer.tokenization.chat import ChatTemplate
from tests.support import chat_templates, engines
from tests.support.parrot import parrot_engine
from tests.support.servers import FoldedStream, Server, fold_chat, running_server, sse_events
from tests.support.tokenizers import ByteTokenizer
from tests.support.tool_texts import Said, spell

pytestmark = pytest.mark.feature("http", "chat", "tools")

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g")]
CALL = spell("hermes", [Said("f", '{"a": 1}')])
SCRIPTS = {
    "text": "All is well.",
    "call": f"Wait. {CALL}",
    "broken": CALL.replace("1}", "1,}"),
    "cut": CALL,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(parrot_engine(), tool_parser="hermes", reasoning_parser="none") as running:
        yield running


@pytest.fixture(scope="module")
def json_server() -> Iterator[Server]:
    with running_server(parrot_engine(), tool_parser="json", reasoning_parser="think") as running:
        yield running


def post(server: Server, said: Any, **fields: Any) -> httpx.Response:
    """``said`` is what the model will say, or the messages themselves."""
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    body = {"messages": messages, "temperature": 0, **fields}
    return server.client.post("/v1/chat/completions", json=body)


def both(server: Server, said: Any, **fields: Any) -> dict[str, Any]:
    """The answer as a whole, which the stream of the same request adds up to but for ids."""
    response = post(server, said, **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    streamed = fold_chat(sse_events(post(server, said, stream=True, **fields)))
    assert streamed.done
    assert streamed.error is None
    assert len(streamed.choices) == len(answer["choices"])
    for choice in answer["choices"]:
        assert seen(choice) == seen_in(streamed, choice["index"])
    ids = [call["id"] for choice in answer["choices"] for call in choice["message"].get("tool_calls", [])]
    ids += [call["id"] for choice in streamed.choices.values() for call in choice.tool_calls.values()]
    assert len(set(ids)) == len(ids)
    assert all(ids)
    return answer


def seen(choice: dict[str, Any]) -> tuple[Any, ...]:
    message = choice["message"]
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []
    ]
    reasoning = message.get("reasoning_content") or ""
    return message["content"] or "", reasoning, calls, choice["finish_reason"], choice["stop_reason"]


def seen_in(streamed: FoldedStream, index: int) -> tuple[Any, ...]:
    choice = streamed.choices[index]
    assert list(choice.tool_calls) == list(range(len(choice.tool_calls)))
    calls = [(call["name"], call["arguments"]) for call in choice.tool_calls.values()]
    return choice.text, choice.reasoning, calls, choice.finish_reason, choice.stop_reason


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ---- CHT-02


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("choice", ["auto", None, "none"])
def test_cht_02_finish_reasons_where_the_model_is_free(server: Server, script: str, choice: Any) -> None:
    """``tool_calls`` if and only if there is a complete call; a cut one ends with ``length``, and its arguments are the
    beginning that the model wrote. A broken call is content. ``none`` leaves the text as it is."""
    said = SCRIPTS[script]
    fields = {} if choice is None else {"tool_choice": choice}
    if script == "cut":
        fields["max_tokens"] = _tokens(server, said.split("1}")[0] + "1")
    got = seen(both(server, said, tools=TOOLS, **fields)["choices"][0])
    free = choice != "none"
    if script == "cut":
        expected = ("", [("f", '{"a": 1')], "length") if free else (said.split("1}")[0] + "1", [], "length")
    elif script == "call" and free:
        expected = ("Wait. ", [("f", '{"a": 1}')], "tool_calls")
    else:
        expected = (said, [], "stop")
    assert (got[0], got[2], got[3]) == expected


def _tokens(server: Server, text: str) -> int:
    assert server.engine.tokenizer is not None
    return len(server.engine.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.feature("structured output")
def test_cht_02_forced_calls_of_a_model_that_says_anything(json_server: Server, seed: int) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "temperature": 1, "seed": seed, "max_tokens": 400}
    _, _, calls, finish, _ = seen(
        both(json_server, "<anything>", parallel_tool_calls=False, **fields)["choices"][0]
    )
    assert finish == "tool_calls"
    for _, arguments in calls:
        jsonschema.validate(json.loads(arguments), PARAMETERS)


# ---- CHT-03

THREE = [Said("f", '{"a": 1}'), Said("g", '{"a": 2, "b": "y"}'), Said("f", '{"a": 3}')]


@pytest.mark.parametrize("form", ["hermes", "json"])
@pytest.mark.parametrize("interval", [1, 7, 1000])
def test_cht_03_three_calls_in_any_pieces(
    server: Server, json_server: Server, form: str, interval: int
) -> None:
    asked = server if form == "hermes" else json_server
    answer = both(asked, spell(form, THREE), tools=TOOLS, stream_interval=interval)
    content, _, calls, finish, _ = seen(answer["choices"][0])
    assert (content, finish) == ("", "tool_calls")
    assert calls == [(call.name, call.arguments) for call in THREE]
    assert answer["choices"][0]["message"]["content"] is None
    assert [set(call) for call in answer["choices"][0]["message"]["tool_calls"]] == [
        {"id", "type", "function"}
    ] * 3


@pytest.mark.parametrize("form", ["hermes", "json"])
def test_cht_03_choices_with_different_numbers_of_calls(
    server: Server, json_server: Server, form: str
) -> None:
    """Indices count within a choice; ids are unique over all of them."""
    asked = server if form == "hermes" else json_server
    said = "<next choice>".join([spell(form, THREE), "No call.", spell(form, THREE[:1])])
    answer = both(asked, said, tools=TOOLS, n=3)
    assert [len(seen(choice)[2]) for choice in answer["choices"]] == [3, 0, 1]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["tool_calls", "stop", "tool_calls"]


@pytest.mark.parametrize("form", ["hermes", "json"])
def test_cht_03_at_most_one_call_if_they_are_not_parallel(
    server: Server, json_server: Server, form: str
) -> None:
    asked = server if form == "hermes" else json_server
    answer = both(asked, spell(form, THREE), tools=TOOLS, parallel_tool_calls=False)
    assert seen(answer["choices"][0])[:4] == ("", "", [("f", '{"a": 1}')], "tool_calls")


@pytest.mark.feature("reasoning")
def test_cht_03_calls_after_reasoning(json_server: Server) -> None:
    answer = both(json_server, f"<think>hm</think>\n{spell('json', THREE)}", tools=TOOLS)
    assert seen(answer["choices"][0])[:2] == ("", "hm")
    assert len(seen(answer["choices"][0])[2]) == 3


# ---- CHT-07

HISTORY = [
    {"role": "user", "content": "q"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call00000",
                "type": "function",
                "function": {"name": "f", "arguments": '{"b":1,"a":"é"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call00000", "content": "5"},
    {"role": "user", "content": "<user>ok</user>"},
]
PRINTED = {
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}": "b=1;a=é;",
    "{{ c.function.arguments | tojson }}": '{"b": 1, "a": "é"}',
    "{{ c.function.arguments }}": '{"b": 1, "a": "é"}',
}


def with_template(source: str | None) -> Any:
    sources = {} if source is None else {"default": source}
    return replace(parrot_engine(), chat_template=ChatTemplate(sources))


@pytest.mark.parametrize("arguments", PRINTED)
def test_cht_07_second_turns(arguments: str) -> None:
    """Absent and null content are empty, results may be parts, order and characters of the arguments are kept."""
    source = (
        "{% for m in messages %}({{ m.content }}{% for c in m.tool_calls %}"
        + arguments
        + ("{% endfor %}){% endfor %}")
    )
    call = HISTORY[1]
    assert isinstance(call, dict)
    absent = {key: value for key, value in call.items() if key != "content"}
    parts = {**HISTORY[2], "content": [{"type": "text", "text": "5"}]}
    with running_server(with_template(source), tool_parser="hermes") as server:
        for second in (call, absent, {**call, "content": ""}):
            for third in (HISTORY[2], parts):
                response = post(server, [HISTORY[0], second, third, HISTORY[3]], return_token_ids=True)
                assert response.status_code == 200, response.text
                answer = response.json()
                prompt = server.engine.tokenizer.decode(answer["prompt_token_ids"])
                assert prompt == f"(q)({PRINTED[arguments]})(5)(<user>ok</user>)"
                assert answer["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("arguments", ["{bad", "[1]"])
def test_cht_07_arguments_that_are_no_object(server: Server, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [HISTORY[0], {"role": "assistant", "tool_calls": [call]}, *HISTORY[2:]]
    error = error_of(post(server, history))
    assert "messages[1].tool_calls[0].function.arguments" in error["message"]


@pytest.mark.parametrize("arguments", ["{}", ""])
def test_cht_07_empty_arguments(server: Server, arguments: str) -> None:
    """Pinned: an empty string is no arguments."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [HISTORY[0], {"role": "assistant", "tool_calls": [call, call]}, *HISTORY[2:]]
    response = post(server, history)
    assert response.status_code == 200, response.text


def test_cht_07_a_reply_is_usable_for_the_next_turn(server: Server) -> None:
    first = both(server, CALL, tools=TOOLS)["choices"][0]["message"]
    (call,) = first["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
    messages = [{"role": "user", "content": CALL}, first, result, {"role": "user", "content": CALL}]
    second = both(server, messages, tools=TOOLS)["choices"][0]["message"]
    again = {"role": "tool", "tool_call_id": second["tool_calls"][0]["id"], "content": "6"}
    messages += [second, again, {"role": "user", "content": "done"}]
    assert both(server, messages, tools=TOOLS)["choices"][0]["message"]["content"] == "done"


# ---- CHT-08

T1 = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<user>{{ m.content }}</user>{% endfor %}"
)
T2 = "{% for m in messages %}<user>{{ m.content + '' }}</user>{% endfor %}"
T3 = "{% for m in messages %}<user>{% for p in m.content %}({{ p.text }}){% endfor %}</user>{% endfor %}"
T4 = "{% for m in messages %}{{ m.content }"
USER = {"role": "user", "content": "hi"}
AB = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}


@pytest.mark.parametrize(
    ("source", "refused", "served"),
    [
        (T1, [[USER, USER], [{"role": "system", "content": "s"}, USER]], [([USER], "hi")]),
        (T2, [[IMAGE], [{"role": "foo", "content": "x"}]], [([USER, USER], "hi"), ([AB], "a\nb")]),
        (T3, [[IMAGE]], [([AB], "(a)(b)"), ([USER], "(hi)"), ([{"role": "user", "content": []}], "")]),
        (T4, [[USER]], []),
        (None, [[USER]], []),
    ],
)
def test_cht_08_templates_that_refuse(source: str | None, refused: list[Any], served: list[Any]) -> None:
    """Pinned: parts are joined by a newline for templates that take strings. Errors of templates are a 400 with their
    message, and completions work without a template."""
    messages = {
        T1: "roles must alternate",
        T2: "image_url",
        T3: "image_url",
        T4: "chat template",
        None: "no chat",
    }
    with running_server(with_template(source)) as server:
        for position, conversation in enumerate(refused):
            error = error_of(post(server, conversation))
            assert error["param"] == "messages"
            if position == 0:
                assert messages[source] in error["message"]
        for conversation, said in served:
            response = post(server, conversation, return_token_ids=True)
            assert response.status_code == 200, response.text
            prompt = server.engine.tokenizer.decode(response.json()["prompt_token_ids"])
            assert prompt.endswith(f"<user>{said}</user>")
            assert "[{" not in prompt
        for bad in ([], [{"role": "user", "content": 5}], "hi", [5]):
            body = {"messages": bad}
            assert server.client.post("/v1/chat/completions", json=body).status_code == 400
        assert server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_cht_08_the_developer_is_the_system_unless_the_template_names_it(server: Server) -> None:
    messages = [{"role": "developer", "content": "rules"}, {"role": "user", "content": "ok"}]
    response = post(server, messages, return_token_ids=True)
    assert response.status_code == 200
    prompt = server.engine.tokenizer.decode(response.json()["prompt_token_ids"])
    assert prompt.startswith("<system>rules</system>")


# ---- marks that are special tokens


class MistralTokenizer(ByteTokenizer):
    """BYTE-TOK in which the marks of Mistral's calls are special tokens."""

    def __init__(self) -> None:
        super().__init__(("[TOOL_CALLS]", "[INST]"))
        self.special_ids = frozenset({*self.special_ids, 264, 265})


def test_marks_that_are_special_tokens_are_read_and_others_hidden() -> None:
    """Also the ids: this template refuses a history whose ids have not nine characters."""
    tokenizer = MistralTokenizer()
    said = "a[INST]b<|special0|>" + spell("mistral list", THREE[:2])
    script = engines.sequence_script(tokenizer.encode(said))
    engine = engines.scripted(script, engines.config(num_blocks=512), tokenizer=tokenizer, max_model_len=1024)
    template = ChatTemplate({"default": chat_templates.MISTRAL}, {"bos_token": "", "eos_token": ""})
    with running_server(replace(engine, chat_template=template)) as server:
        answer = both(server, "q", tools=TOOLS)["choices"][0]
        calls = [(call.name, call.arguments) for call in THREE[:2]]
        assert seen(answer)[:4] == ("ab", "", calls, "tool_calls")
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "5"}
            for call in answer["message"]["tool_calls"]
        ]
        history = [{"role": "user", "content": "q"}, answer["message"], *results]
        assert post(server, history, tools=TOOLS).status_code == 200
        assert both(server, "q")["choices"][0]["message"]["content"].startswith("ab ")


# ---- reasoning


@pytest.mark.parametrize("budget", [0, 1, 5, -1, None])
@pytest.mark.feature("reasoning")
def test_a_budget_ends_the_reasoning(json_server: Server, budget: int | None) -> None:
    """``thinking_token_budget`` tokens, then the end tag is forced and the answer follows; -1 is no limit."""
    thought = "0123456789"
    answer = both(json_server, f"<think>{thought}</think>ok and more", thinking_token_budget=budget)
    content, reasoning, _, finish, _ = seen(answer["choices"][0])
    assert finish == "stop"
    if budget in (None, -1):
        assert (content, reasoning) == ("ok and more", thought)
    else:
        assert reasoning == thought[:budget]
        assert content.endswith("ok and more")


@pytest.mark.feature("reasoning", "structured output")
def test_a_forced_call_comes_after_the_reasoning(json_server: Server) -> None:
    said = "<think>hm</think>" + spell("json", [Said("f", '{"a": 1}')])
    fields = {"tools": TOOLS, "tool_choice": "required"}
    answer = both(json_server, said, **fields)
    assert seen(answer["choices"][0])[:4] == ("", "hm", [("f", '{"a": 1}')], "tool_calls")


@pytest.mark.feature("structured output")
def test_tools_and_a_form_of_the_answer_together(server: Server) -> None:
    """With ``auto`` the answer is a call, or has the form."""
    schema = {
        "type": "object",
        "properties": {"x": {"const": 5}},
        "required": ["x"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    fields = {"tools": TOOLS, "response_format": form}
    assert seen(both(server, '{"x": 5}', **fields)["choices"][0])[:4] == ('{"x": 5}', "", [], "stop")
    assert seen(both(server, CALL, **fields)["choices"][0])[2:4] == ([("f", '{"a": 1}')], "tool_calls")
    content = seen(both(server, '{"y": "prose"}', **fields, max_tokens=200)["choices"][0])[0]
    assert json.loads(content) == {"x": 5}


@pytest.mark.feature("structured output")
def test_strict_functions_are_constrained_without_being_forced(server: Server) -> None:
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    wrong = spell("hermes", [Said("f", '{"a": "no"}')])
    got = seen(both(server, "Wait. " + wrong, tools=strict, max_tokens=200)["choices"][0])
    assert got[0] == "Wait. "
    jsonschema.validate(json.loads(got[2][0][1]), PARAMETERS)
    assert seen(both(server, "Only text {", tools=strict)["choices"][0])[:2] == ("Only text {", "")
