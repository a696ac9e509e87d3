"""``/v1/chat/completions`` over a real socket."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.parrot import parrot_engine
from tests.support.servers import Folded, FoldedStream, Server, fold_chat, running_server, sse_events

pytestmark = pytest.mark.feature("http", "chat")

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("f", "g")
]


@pytest.fixture(scope="module")
def server():
    with running_server(parrot_engine(), tool_parser="hermes", reasoning_parser="think") as running:
        yield running


def body(said: str, **fields) -> dict:
    return {"messages": [{"role": "user", "content": said}], **fields}


def ask(server: Server, said: str, **fields) -> dict:
    response = server.client.post("/v1/chat/completions", json=body(said, **fields))
    assert response.status_code == 200, response.text
    return response.json()


def events(server: Server, said: str, **fields) -> list:
    response = server.client.post("/v1/chat/completions", json=body(said, stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return sse_events(response)


def stream(server: Server, said: str, **fields) -> FoldedStream:
    return fold_chat(events(server, said, **fields))


def refused(server: Server, param: str | None = None, **fields) -> str:
    response = server.client.post("/v1/chat/completions", json={**body("ok"), **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert ask(server, "ok")["choices"][0]["message"]["content"] == "ok", "a later request works"
    return error["message"]


def assert_same(whole: dict, folded: FoldedStream) -> None:
    """The stream adds up to the answer, but for ids of calls."""
    assert folded.done
    assert folded.error is None
    for choice in whole["choices"]:
        other = folded.choices[choice["index"]]
        message = choice["message"]
        assert (message["content"] or "") == other.text
        assert message.get("reasoning_content", "") == other.reasoning
        assert _calls(message) == [(call["name"], call["arguments"]) for call in other.tool_calls.values()]
        assert choice["finish_reason"] == other.finish_reason
        assert choice["stop_reason"] == other.stop_reason
        if choice["logprobs"] is not None:
            assert choice["logprobs"]["content"] == other.logprobs["content"]
    assert len(whole["choices"]) == len(folded.choices)


def _calls(message: dict) -> list[tuple[str, str]]:
    return [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])
    ]


# ---- the order of chunks


def test_order_of_chunks(server):
    """Roles of all choices first, then deltas, one last chunk per choice, the usage, the terminator."""
    got = events(server, "ab<next choice>cde", n=2, stream_options={"include_usage": True})
    assert got[-1] == "[DONE]"
    assert got[-2]["choices"] == []
    chunks = got[:-2]
    assert all("usage" not in chunk for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert {(c["id"], c["created"], c["model"], c["object"]) for c in got[:-1]} == {
        (got[0]["id"], got[0]["created"], "test", "chat.completion.chunk")
    }
    first = [chunk["choices"][0] for chunk in chunks[:2]]
    assert [(c["index"], c["delta"]) for c in first] == [
        (0, {"role": "assistant", "content": ""}),
        (1, {"role": "assistant", "content": ""}),
    ]
    for index, text in enumerate(("ab", "cde")):
        mine = [c["choices"][0] for c in chunks[2:] if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == text
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert all("role" not in c["delta"] for c in mine)
        assert all(c["delta"] for c in mine[:-1]), "an empty delta in the middle"


def test_echo_comes_before_the_answer(server):
    """Pinned: only a last message with the role of the answer is repeated, so a user's message is not."""
    messages = [{"role": "user", "content": "xy"}, {"role": "assistant", "content": "so far"}]
    fields = {
        "messages": messages,
        "echo": True,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    got = events(server, "", **fields)
    assert [c["choices"][0]["delta"] for c in got[:2]] == [
        {"role": "assistant", "content": ""},
        {"content": "so far"},
    ]
    whole = ask(server, "", **fields)
    assert whole["choices"][0]["message"]["content"] == "so farxy"
    assert_same(whole, fold_chat(got))
    assert ask(server, "xy", echo=True)["choices"][0]["message"]["content"] == "xy"


def test_calls_and_reasoning_in_chunks(server):
    """Id, type and name come once; deltas of one chunk never split a call into two entries of the same index."""
    got = events(server, f"<think>hm</think>hi {CALL}", tools=TOOLS)
    deltas = [event["choices"][0]["delta"] for event in got[1:-1]]
    entries = [entry for delta in deltas for entry in delta.get("tool_calls", [])]
    assert [sorted(entry) for entry in entries[:1]] == [["function", "id", "index", "type"]]
    assert all(set(entry) == {"function", "index"} for entry in entries[1:])
    assert all(len(delta.get("tool_calls", [0])) == 1 for delta in deltas)
    assert [set(delta) for delta in deltas if "reasoning_content" in delta]
    assert_same(ask(server, f"<think>hm</think>hi {CALL}", tools=TOOLS), fold_chat(got))


# ---- API-04


@pytest.mark.parametrize("options", ["absent", None, {}, {"include_usage": False}])
def test_api_04_no_usage_unless_asked_for(server, options):
    fields = {} if options == "absent" else {"stream_options": options}
    assert all("usage" not in event for event in events(server, "abc", **fields)[:-1])


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("said", "fields", "reason"),
    [
        ("abc", {}, "stop"),
        ("abc and more", {"stop": ["and"]}, "stop"),
        ("abcdef", {"max_tokens": 4}, "length"),
        ("h\u00e9 \U0001f600!", {}, "stop"),
        (CALL, {"tools": TOOLS}, "tool_calls"),
        ("<think>one two</think>three", {}, "stop"),
    ],
)
def test_api_04_usage_in_streams(server, said, fields, reason, n):
    """One chunk without choices, last before the terminator, with the numbers of the answer as a whole. Pinned: a
    token that ends the answer is not counted."""
    whole = ask(server, said, n=n, **fields)
    got = events(server, said, n=n, stream_options={"include_usage": True}, **fields)
    assert got[-2]["choices"] == []
    assert [event for event in got[:-2] if "usage" in event] == []
    usage = got[-2]["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details"):
        assert usage[name] == whole["usage"][name]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert usage["prompt_tokens"] == ask(server, said, **fields)["usage"]["prompt_tokens"], (
        "counted once for all n"
    )
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"] - 1
    assert fold_chat(got).choices[0].finish_reason == reason


def test_api_04_continuous_usage(server):
    got = events(server, "abcd", stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in got[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_api_04_stream_options_need_a_stream(server):
    """Pinned: 400, as OpenAI has it."""
    assert "stream" in refused(server, "stream_options", stream_options={"include_usage": True})
    assert "include_usage" in refused(
        server, "stream_options", stream=True, stream_options={"continuous_usage_stats": True}
    )


def test_reasoning_tokens_are_counted(server):
    """Pinned: its marks count too, and tokens count although the text is not shown."""
    said = "<think>abc</think>de"
    for fields in ({}, {"include_reasoning": False}):
        answer = ask(server, said, **fields)
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
        assert answer["usage"]["completion_tokens"] == 7
        assert answer["choices"][0]["message"]["content"] == "de"
        assert ("reasoning_content" in answer["choices"][0]["message"]) == (fields == {})
        assert_same(answer, stream(server, said, **fields))


# ---- LPB-01, LPB-05


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 0}, {"top_logprobs": None}, {"top_logprobs": 3}])
def test_lpb_01_logprobs_of_chats(server, fields):
    """Pinned: ``top_logprobs`` holds exactly the most likely ones; the chosen token is in the entry itself."""
    said = "a\u00e9\U0001f600z"
    whole = ask(server, said, logprobs=True, **fields)
    entries = whole["choices"][0]["logprobs"]["content"]
    number = fields.get("top_logprobs") or 0
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == number
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] == pytest.approx(0, abs=1e-3)
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == said
    assert len(entries) == whole["usage"]["completion_tokens"]
    assert_same(whole, stream(server, said, logprobs=True, **fields))


@pytest.mark.parametrize("number", [21, 1_000_000, -1, 1.5, "3"])
def test_lpb_01_numbers_out_of_range_are_refused(server, number):
    refused(server, "top_logprobs", logprobs=True, top_logprobs=number)


def test_lpb_01_top_logprobs_need_logprobs(server):
    refused(server, "top_logprobs", top_logprobs=3)
    refused(server, "top_logprobs", top_logprobs=3, logprobs=False)
    assert ask(server, "ok", top_logprobs=0)["choices"][0]["logprobs"] is None
    assert ask(server, "ok", logprobs=None)["choices"][0]["logprobs"] is None


def test_lpb_01_tokens_as_ids(server):
    answer = ask(server, "ab", logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["token_id:97", "token_id:98"]
    assert [entry["top_logprobs"][0]["token"] for entry in entries] == ["token_id:97", "token_id:98"]


def test_logprobs_of_named_tokens(server):
    """Pinned: they are shown without ``logprobs`` too, behind the most likely ones."""
    fields = {"logprob_token_ids": [100, 101]}
    entries = ask(server, "ab", **fields)["choices"][0]["logprobs"]["content"]
    assert [[top["token"] for top in entry["top_logprobs"]] for entry in entries] == [["d", "e"]] * 2
    entries = ask(server, "ab", logprobs=True, top_logprobs=1, **fields)["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in entries[0]["top_logprobs"]] == ["a", "d", "e"]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    "fields", [{"stop_token_ids": [ord("c")]}, {"stop": [" ha ha"]}, {"stop": ["zz"]}, {}], ids=str
)
def test_lpb_05_tokens_logprobs_and_text_are_cut_together(server, fields, include):
    said = "a b ha ha c"
    asked = {"logprobs": True, "return_token_ids": True, "include_stop_str_in_output": include, **fields}
    whole = ask(server, said, **asked)
    choice = whole["choices"][0]
    text, ids, entries = (
        choice["message"]["content"],
        choice["token_ids"],
        choice["logprobs"]["content"],
    )
    assert len(ids) == len(entries) == whole["usage"]["completion_tokens"]
    assert bytes(token for token in ids if token < 256).decode() == text
    assert [entry["bytes"] for entry in entries if len(entry["bytes"]) == 1] == [[t] for t in ids if t < 256]
    assert all("c" not in entry["token"] for entry in entries) or include or "stop_token_ids" not in fields
    folded = stream(server, said, **asked)
    assert_same(whole, folded)
    assert folded.choices[0].token_ids == ids


# ---- DET-03


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_det_03_a_character_cut_by_the_limit(server, tools):
    """Pinned: the incomplete tail is shown as U+FFFD, streaming or not."""
    said = "ok<0xf0><0x9f><0x98>"
    fields = {"max_tokens": 5, **({"tools": tools} if tools else {})}
    whole = ask(server, said, **fields)
    choice = whole["choices"][0]
    assert choice["message"]["content"].startswith("ok")
    assert set(choice["message"]["content"][2:]) <= {"\ufffd"}
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 5
    assert_same(whole, stream(server, said, **fields))


def test_det_03_bad_bytes_in_the_reasoning_before_a_call(server):
    said = f"<think><0xe6><0x80>=</think>{CALL}"
    whole = ask(server, said, tools=TOOLS)
    message = whole["choices"][0]["message"]
    assert [
        (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]
    ] == [("f", {"a": 1})]
    assert message["content"] is None
    assert message["reasoning_content"].endswith("=")
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert_same(whole, stream(server, said, tools=TOOLS))
    assert ask(server, "ok")["choices"][0]["message"]["content"] == "ok"


# ---- SMP-03


def texts(server: Server, count: int, **fields) -> list[str]:
    answers = [ask(server, "<anything>", max_tokens=16, ignore_eos=True, **fields) for _ in range(count)]
    return [str(c["token_ids"]) for answer in answers for c in answer["choices"]]


@pytest.mark.parametrize("fields", [{}, {"seed": None}])
def test_smp_03_no_seed_is_fresh_entropy(server, fields):
    got = texts(server, 3, return_token_ids=True, **fields)
    got += texts(server, 1, return_token_ids=True, n=3, **fields)
    assert len(set(got)) == len(got)


def test_smp_03_equal_requests_in_one_batch_differ(server):
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: texts(server, 1, return_token_ids=True)[0], range(4)))
    assert len(set(got)) == 4


def test_smp_03_a_seed_repeats(server):
    for seed in (0, -1, 2**63 - 1):
        one, two = texts(server, 2, return_token_ids=True, seed=seed)
        assert one == two


# ---- API-08


@pytest.mark.parametrize("n", [1, 2])
def test_api_08_a_failure_before_the_first_token_is_a_500(server, n):
    said = "<fail>" + "<next choice><fail>" * (n - 1)
    for streaming in (False, True):
        response = server.client.post("/v1/chat/completions", json=body(said, n=n, stream=streaming))
        assert response.status_code == 500, response.text
        assert "not finite" in response.json()["error"]["message"]
    assert ask(server, "ok")["choices"][0]["message"]["content"] == "ok"


def test_api_08_a_failure_within_a_stream(server):
    """An error event and the terminator; the failed choice has no finish reason."""
    said = "abc<next choice>" + "a" * 300 + "<fail>"
    got = events(server, said, n=2)
    assert got[-1] == "[DONE]"
    assert got[-2]["error"]["code"] == 500
    folded = fold_chat(got)
    assert folded.choices[1].finish_reason is None
    response = server.client.post("/v1/chat/completions", json=body(said, n=2))
    assert response.status_code == 500
    assert ask(server, "ok")["choices"][0]["message"]["content"] == "ok"


# ---- fields


def test_content_parts_system_and_developer_messages(server):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    assert ask(server, "", messages=messages)["choices"][0]["message"]["content"] == "a\nb"


def test_limits_of_the_answer(server):
    """``max_completion_tokens`` wins; without either, the room left in the context is the limit."""
    assert ask(server, "abcdef", max_tokens=5, max_completion_tokens=2)["usage"]["completion_tokens"] == 2
    assert ask(server, "x" * 500)["usage"]["completion_tokens"] == 500
    whole = ask(server, "<anything>", ignore_eos=True, stop_token_ids=[], max_tokens=10**6)
    assert whole["usage"]["total_tokens"] == 2048
    assert whole["choices"][0]["finish_reason"] == "length"


def test_stop_reason_names_what_stopped(server):
    assert ask(server, "ab", stop="b")["choices"][0]["stop_reason"] == "b"
    assert ask(server, "ab", stop_token_ids=[98])["choices"][0]["stop_reason"] == 98
    assert ask(server, "ab")["choices"][0]["stop_reason"] is None


def test_token_ids_of_prompt_and_answer(server):
    answer = ask(server, "ab", return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == [97, 98]
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    got = events(server, "ab", return_token_ids=True)
    assert got[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert all("prompt_token_ids" not in event for event in got[1:-1])
    assert fold_chat(got).choices[0].token_ids == [97, 98]
    assert "token_ids" not in ask(server, "ab")["choices"][0]


def test_prompt_logprobs(server):
    answer = ask(server, "ab", prompt_logprobs=1)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert all(entry for entry in answer["prompt_logprobs"][1:])
    refused(server, "prompt_logprobs", prompt_logprobs=1, stream=True)


def test_metrics_when_asked_for(server):
    answer = ask(server, "abc", return_metrics=True)
    assert answer["metrics"]["time_to_first_token_ms"] > 0
    got = events(server, "abc", return_metrics=True, stream_options={"include_usage": True})
    assert got[-2]["metrics"]["mean_itl_ms"] > 0
    assert "metrics" not in ask(server, "abc")
    refused(server, "return_metrics", return_metrics=True, n=2)


def test_stream_interval_joins_tokens(server):
    folded = stream(server, "abcdefghij", stream_interval=4)
    assert folded.choices[0].text == "abcdefghij"
    assert folded.choices[0].chunks <= 6


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {"messages": []}),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        ),
        ("messages", {"messages": "hi"}),
        ("temperature", {"temperature": 3}),
        ("temperature", {"temperature": "1"}),
        ("n", {"n": 0}),
        ("n", {"n": 10**6}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 2**63}),
        ("tools", {"tools": []}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "any"}),
        ("functions", {"functions": []}),
        ("audio", {"audio": {}}),
        ("best_of", {"best_of": 2}),
        ("reasoning_effort", {"reasoning_effort": "extreme"}),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        (
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        ),
        ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
        ("structured_outputs", {"structured_outputs": {"json": {}, "regex": "a"}}),
        ("seed", {"seed": 2**63}),
    ],
    ids=str,
)
def test_fields_that_are_refused_are_named(server, param, fields):
    refused(server, param, **fields)


def test_reasoning_field_by_setting():
    with running_server(parrot_engine(), reasoning_parser="think", reasoning_field="reasoning") as server:
        said = "<think>hm</think>a"
        message = ask(server, said)["choices"][0]["message"]
        assert message["reasoning"] == "hm"
        assert "reasoning_content" not in message
        folded = stream(server, said).choices[0]
        # How many tokens a chunk holds depends on how quickly it is read.
        assert folded == Folded(text="a", reasoning="hm", finish_reason="stop", chunks=folded.chunks)


def test_usage_by_setting():
    with running_server(parrot_engine(), force_include_usage=True) as server:
        assert stream(server, "ab").usage["completion_tokens"] == 2
