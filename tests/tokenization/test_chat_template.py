"""Chat templates: what goes into the prompt, and what is refused."""

from datetime import datetime
from typing import Any

import pytest

from jaxinfer.tokenization.chat import ChatTemplate, ChatTemplateError
from jaxinfer.tokenization.chat_messages import ToolArguments, parse_arguments

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ALTERNATING = (  # T1
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.content | trim }}]{% endfor %}"
)
STRINGS = "{% for m in messages %}<{{ m.content + '' }}>{% endfor %}"  # T2
PARTS = "{% for m in messages %}<{% for p in m.content %}({{ p.text }}){% endfor %}>{% endfor %}"  # T3
BOTH = (
    "{% for m in messages %}<{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}({{ p['text'] }}){% endfor %}{% endif %}>{% endfor %}"
)
BROKEN = "{% for m in messages %}{{ m.content }"  # T4
TWO_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def render(source: str, messages: Any, **options: Any) -> str:
    return ChatTemplate({"default": source}).render(messages, **options)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_plain_conversation() -> None:
    assert render(CHATML, user("hi")) == "<|user|>hi\n<|assistant|>"
    assert render(CHATML, user("hi"), add_generation_prompt=False) == "<|user|>hi\n"


def test_cht_08_errors_of_the_template_carry_its_message() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render(ALTERNATING, [*user("a"), *user("b")])
    with pytest.raises(ChatTemplateError, match="no system role"):
        render(ALTERNATING, [{"role": "system", "content": "s"}, *user("b")])
    assert render(ALTERNATING, user(" a ")) == "[a]"


def test_cht_08_broken_or_missing_template_fails_when_used() -> None:
    broken = ChatTemplate({"default": BROKEN})
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match="unexpected"):
            broken.render(user("a"))
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplate({}).render(user("a"))
    with pytest.raises(ChatTemplateError, match="division by zero"):
        render("{{ 1 / 0 }}", user("a"))


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (STRINGS, TWO_PARTS, "<a\nb>"),
        (CHATML, TWO_PARTS, "<|user|>a\nb\n<|assistant|>"),
        (PARTS, TWO_PARTS, "<(a)(b)>"),
        (BOTH, TWO_PARTS, "<(a)(b)>"),
        (STRINGS, "ab", "<ab>"),
        (PARTS, "ab", "<(ab)>"),
        (BOTH, "ab", "<ab>"),
        (STRINGS, [], "<>"),
        (PARTS, [], "<>"),
        (ALTERNATING, TWO_PARTS, "[a\nb]"),
        ("{{ messages | tojson }}", TWO_PARTS, '[{"role": "user", "content": "a\\nb"}]'),
    ],
)
def test_cht_08_content_parts(source: str, content: Any, expected: str) -> None:
    r"""Pinned: a template for strings gets the parts joined by '\n', one for lists gets the list."""
    text = render(source, user(content))
    assert text == expected
    assert "[{'" not in text


def test_cht_08_list_support_is_found_for_each_role() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' and m.content is not string %}"
        "{% for p in m.content %}({{ p.text }}){% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    messages = [{"role": role, "content": TWO_PARTS} for role in ("user", "assistant", "tool", "system")]
    assert render(source, messages) == "(a)(b)a\nba\nba\nb"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("hi", "non-empty list"),
        ([5], r"messages\[0\]: an object"),
        ([{"content": "a"}], r"messages\[0\].role"),
        ([{"role": "", "content": "a"}], r"messages\[0\].role"),
        (
            [*user("a"), {"role": "foo", "content": "a"}],
            r"messages\[1\].role: 'foo' is not known; allowed: system",
        ),
        (user(5), r"messages\[0\].content: a string or a list of parts is needed, this is a number"),
        (user({"text": "a"}), r"messages\[0\].content"),
        (
            user([{"type": "image_url", "image_url": {"url": "x"}}]),
            r"content\[0\].type: 'image_url' is not supported",
        ),
        (user([{"type": "text"}]), r"content\[0\].text: a string is needed"),
        (user([7]), r"content\[0\]: a content part is an object"),
        ([{"role": "assistant", "tool_calls": 5}], r"tool_calls: a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\].function.name"),
        ([{"role": "assistant", "content": "", "reasoning": 5}], "reasoning text"),
    ],
)
def test_cht_08_malformed_conversations_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(CHATML, messages)


def test_cht_08_developer_is_system_unless_the_template_names_it() -> None:
    messages = [{"role": "developer", "content": "d"}, *user("u")]
    assert render(CHATML, messages).startswith("<|system|>d")
    named = "{% for m in messages %}{{ 'DEV' if m.role == 'developer' else m.role }}{% endfor %}"
    assert render(named, messages) == "DEVuser"


def test_roles_that_a_template_names_are_allowed() -> None:
    source = "{% for m in messages %}{% if m.role == 'critic' %}C{% endif %}{{ m.content }}{% endfor %}"
    assert render(source, [{"role": "critic", "content": "x"}]) == "Cx"


TOJSON = "{% for c in messages[1].tool_calls %}{{ c.function.arguments | tojson }};{% endfor %}"
ITEMS = (
    "{% for c in messages[1].tool_calls %}{% for k, v in c.function.arguments.items() %}"
    "{{ k }}={{ v }};{% endfor %}{% endfor %}"
)
ITEMS_FILTER = ITEMS.replace("arguments.items()", "arguments | items")
PRINTED = "{% for c in messages[1].tool_calls %}{{ c.function.arguments }};{% endfor %}"
ADDED = "{% for c in messages[1].tool_calls %}{{ 'x' + c.function.arguments + ';' }}{% endfor %}"
IF_STRING = PRINTED.replace("arguments }}", "arguments if c.function.arguments is string else 'M' }}")


def tool_history(arguments: Any, **assistant: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c1", "content": TWO_PARTS}
    return [*user("u"), {"role": "assistant", "tool_calls": [call], **assistant}, result]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TOJSON, '{"b": 1, "a": "é"};'),
        (ITEMS, "b=1;a=é;"),
        (ITEMS_FILTER, "b=1;a=é;"),
        (PRINTED, '{"b": 1, "a": "é"};'),
        (ADDED, 'x{"b": 1, "a": "é"};'),
        (IF_STRING, "M;"),
    ],
)
def test_cht_07_arguments_for_every_kind_of_template(source: str, expected: str) -> None:
    for arguments in ('{"b":1,"a":"é"}', '{"b":1,"a":"\\u00e9"}', {"b": 1, "a": "é"}):
        for assistant in ({"content": None}, {}, {"content": ""}):
            assert render(source, tool_history(arguments, **assistant)) == expected


def test_cht_07_absent_content_is_empty() -> None:
    for assistant in ({"content": None}, {}):
        text = render(CHATML, tool_history("{}", **assistant))
        assert text == "<|user|>u\n<|assistant|>\n<|tool|>a\nb\n<|assistant|>"


@pytest.mark.parametrize("arguments", ["", "{}", None, {}])
def test_cht_07_empty_arguments(arguments: Any) -> None:
    """Pinned: an empty string means no arguments."""
    assert render(TOJSON, tool_history(arguments)) == "{};"


@pytest.mark.parametrize(
    "arguments", ["{bad", "[1]", "5", '"x"', "null", '{"a": NaN}', 5, [1], "[" * 100_000]
)
def test_cht_07_arguments_that_are_no_object(arguments: Any) -> None:
    with pytest.raises(ChatTemplateError, match=r"messages\[1\].tool_calls\[0\].function.arguments"):
        render(TOJSON, tool_history(arguments))


def test_cht_07_the_callers_messages_are_not_changed() -> None:
    messages = tool_history('{"a": 1}', content=None)
    render(TOJSON, messages)
    assert messages == tool_history('{"a": 1}', content=None)


def test_tool_arguments_are_json_where_a_string_is_needed() -> None:
    arguments = parse_arguments('{"é": [1, {"x": null}], "n": 12345678901234567890}', "here")
    assert isinstance(arguments, ToolArguments)
    assert f"{arguments}" == '{"é": [1, {"x": null}], "n": 12345678901234567890}'
    with pytest.raises(TypeError):
        arguments + 1


def test_reasoning_is_found_under_every_name() -> None:
    source = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}{% endfor %}"
    for key in ("reasoning_content", "reasoning", "thinking"):
        assert render(source, [{"role": "assistant", "content": "x", key: "why"}]) == "why|why|why"
    assert render(source, user("x")) == "||"


def test_named_templates() -> None:
    template = ChatTemplate({"default": "D", "tool_use": "T", "rag": "R"})
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert template.render(user("x")) == "D"
    assert template.render(user("x"), tools=tools) == "T"
    assert template.render(user("x"), tools=[]) == "D"
    assert template.render(user("x"), template_name="rag") == "R"
    with pytest.raises(ChatTemplateError, match="'foo'; it has: default, rag, tool_use"):
        template.render(user("x"), template_name="foo")


def test_helpers_and_variables_of_templates() -> None:
    source = (
        "{{ bos_token }}{{ strftime_now('%Y') }}{{ enable_thinking }}{{ tools | tojson }}"
        "{% generation %}{{ messages[0].content }}{% endgeneration %}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"}, now=lambda: datetime(2031, 1, 2))
    text = template.render(user("é<"), tools=[{"name": "<é>"}], template_kwargs={"enable_thinking": False})
    assert text == '<s>2031False[{"name": "<é>"}]é<01'
    with pytest.raises(ChatTemplateError, match="messages cannot be set"):
        template.render(user("x"), template_kwargs={"messages": []})


def test_the_sandbox_holds() -> None:
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ):
        with pytest.raises(ChatTemplateError):
            render(source, user("x"))


@pytest.mark.parametrize("source", [CHATML, STRINGS, PARTS, BOTH])
def test_continue_final_message(source: str) -> None:
    messages = [*user("q"), {"role": "assistant", "content": "The answer "}]
    text = render(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("The answer ")
    assert text == render(source, messages, add_generation_prompt=False)[: len(text)]


def test_continue_final_message_with_a_template_that_trims() -> None:
    messages = [*user("q"), {"role": "assistant", "content": " The answer "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(ALTERNATING, messages, **options) == "[q][The answer"


def test_continue_final_message_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        render(CHATML, user("q"), continue_final_message=True)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(ChatTemplateError, match="no text to continue"):
        render(CHATML, user(""), **options)
    with pytest.raises(ChatTemplateError, match="does not show"):
        render("fixed", user("q"), **options)
