"""What becomes of a chat: prompt ids, sampling parameters, parser."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.config import ServerConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.request import RequestError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.structured.spec import StructuredOutputs
from jaxinfer.tokenization.chat import ChatTemplate
from jaxinfer.tokenization.tokenizer import Tokenizer
from serve.conversation import INLINE_CHARACTERS, MAX_NESTING, Chat, Conversations, PreparedChat
from tests.support import chat_templates
from tests.support.tokenizers import ByteTokenizer
from tests.support.tool_texts import Said, read, shown, spell

pytestmark = pytest.mark.feature("chat")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
STRINGS = "{% for m in messages %}<{{ m.content + '' }}>{% endfor %}"
PARTS = "{% for m in messages %}<{% for p in m.content %}({{ p.text }}){% endfor %}>{% endfor %}"


def conversations(template: str | None, tokenizer: Tokenizer | None = None, **settings: Any) -> Conversations:
    sources = {} if template is None else {"default": template}
    return Conversations(
        tokenizer or ByteTokenizer(), ChatTemplate(sources, SPECIAL), ServerConfig(**settings)
    )


def user(content: Any = "hi") -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def prepare(
    template: str | None, messages: Any, params: SamplingParams | None = None, **chat: Any
) -> PreparedChat:
    return conversations(template).prepare_now(Chat(messages, **chat), params or SamplingParams())


def refusal(template: str | None, messages: Any, **chat: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        prepare(template, messages, **chat)
    return error.value


@pytest.mark.parametrize("name", ["HERMES", "THINKING", "LLAMA3", "MISTRAL", "DEEPSEEK_V3", "DEEPSEEK_V31"])
def test_prompts_are_what_the_template_prints(name: str) -> None:
    """No BOS is added: templates print their own."""
    tokenizer = ByteTokenizer(("<s>", "</s>"), add_bos=True)
    template = ChatTemplate({"default": vars(chat_templates)[name]}, SPECIAL)
    prepared = Conversations(tokenizer, template, ServerConfig()).prepare_now(
        Chat(user(), tools=TOOLS), SamplingParams()
    )
    assert prepared.prompt == template.render(user(), tools=TOOLS)
    assert list(prepared.prompt_token_ids) == tokenizer.encode(prepared.prompt, add_special_tokens=False)
    asked = Conversations(tokenizer, template, ServerConfig()).prepare_now(
        Chat(user(), add_special_tokens=True), SamplingParams()
    )
    assert asked.prompt_token_ids[0] == tokenizer.bos_token_id


def test_prompts_equal_those_of_transformers() -> None:
    """The same ids as ``apply_chat_template(tokenize=True)``, by its own renderer."""
    from transformers.utils.chat_template_utils import render_jinja_template

    history = [
        *user("é<|im_end|>"),
        {"role": "assistant", "content": "", "tool_calls": [_call('{"b": 1, "a": "é"}')]},
        {"role": "tool", "content": "5", "tool_call_id": "call00000"},
        *user(),
    ]
    plain = [dict(message) for message in history]
    plain[1]["tool_calls"] = [_call({"b": 1, "a": "é"})]
    for template in (chat_templates.HERMES, chat_templates.LLAMA3, chat_templates.DEEPSEEK_V3):
        (expected,), _ = render_jinja_template(
            conversations=[plain], tools=TOOLS, chat_template=template, add_generation_prompt=True, **SPECIAL
        )
        assert prepare(template, history, tools=TOOLS).prompt == expected


def _call(arguments: Any, name: str = "f") -> dict[str, Any]:
    return {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}


ITEMS = (
    "{% for m in messages %}<{{ m.content }}>{% for c in m.tool_calls %}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
)
TOJSON = ITEMS.replace(
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
    "{{ c.function.arguments | tojson }}",
)
AS_STRING = TOJSON.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}")


@pytest.mark.parametrize(
    ("template", "printed"),
    [(ITEMS, "b=1;a=é;"), (TOJSON, '{"b": 1, "a": "é"}'), (AS_STRING, '{"b": 1, "a": "é"}')],
)
@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
@pytest.mark.parametrize("result", ["5", [{"type": "text", "text": "5"}]])
@pytest.mark.feature("tools")
def test_cht_07_a_history_with_calls(
    template: str, printed: str, content: dict[str, Any], result: Any
) -> None:
    """Order and characters of the arguments are kept; absent content is empty."""
    history = [
        *user("q"),
        {"role": "assistant", **content, "tool_calls": [_call('{"b":1,"a":"é"}'), _call("{}", "g")]},
        {"role": "tool", "content": result, "tool_call_id": "call00000"},
        *user("r"),
    ]
    expected = printed if template is ITEMS else printed + "{}"
    assert prepare(template, history).prompt == f"<q><>{expected}<5><r>"


@pytest.mark.parametrize("arguments", ["{bad", "[1]", "5", '"x"', "null", 5])
def test_cht_07_arguments_that_are_no_object_are_refused(arguments: Any) -> None:
    history = [*user(), {"role": "assistant", "content": None, "tool_calls": [_call(arguments)]}, *user()]
    error = refusal(TOJSON, history)
    assert error.param == "messages"
    assert "messages[1].tool_calls[0].function.arguments" in str(error)


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_cht_07_empty_arguments_are_an_empty_object(arguments: Any) -> None:
    """Pinned: an empty string, as some clients send for calls without arguments, is ``{}``."""
    history = [*user(), {"role": "assistant", "content": None, "tool_calls": [_call(arguments)]}, *user()]
    assert prepare(TOJSON, history).prompt == "<hi><>{}<hi>"


T1 = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.content }}]{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (T1, [*user(), *user()], "roles must alternate"),
        (T1, [{"role": "system", "content": "s"}, *user()], "no system role"),
        (T1, [{"role": "developer", "content": "s"}, *user()], "no system role"),
        (T1, [], "non-empty list"),
        (STRINGS, [{"role": "foo", "content": "x"}], "'foo' is not known"),
        (STRINGS, user(5), "a string or a list"),
        (STRINGS, user([{"type": "image_url", "image_url": {"url": "x"}}]), "image_url"),
        (PARTS, user([{"type": "image_url", "image_url": {"url": "x"}}]), "image_url"),
        (STRINGS, ["hi"], "an object is needed"),
        ("{% for m in messages %}{{ m.content }", user(), "chat template"),
        ("{{ 1 / 0 }}", user(), "division by zero"),
        ("{{ nothing.at.all }}", user(), "undefined"),
        (None, user(), "no chat template"),
    ],
)
def test_cht_08_what_the_template_refuses(template: str | None, messages: Any, message: str) -> None:
    error = refusal(template, messages)
    assert message in str(error)
    assert error.param == "messages"


@pytest.mark.parametrize(
    ("template", "content", "printed"),
    [
        (STRINGS, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "<a\nb>"),
        (PARTS, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "<(a)(b)>"),
        (STRINGS, [], "<>"),
        (PARTS, [], "<>"),
        (PARTS, "a", "<(a)>"),
    ],
)
def test_cht_08_parts(template: str, content: Any, printed: str) -> None:
    """Pinned: templates that take strings get parts joined by a newline; lists are passed to those that take lists."""
    assert prepare(template, user(content)).prompt == printed


def test_deeply_nested_input_is_refused() -> None:
    nested: Any = "x"
    for _ in range(MAX_NESTING):
        nested = [nested]
    chats = conversations(STRINGS)
    with pytest.raises(RequestError, match="nested deeper"):
        asyncio.run(chats.prepare(Chat(user(nested)), SamplingParams()))


@pytest.mark.parametrize("length", [10, INLINE_CHARACTERS + 1])
def test_short_and_long_chats_are_the_same(length: int) -> None:
    chats = conversations(STRINGS)
    prepared = asyncio.run(chats.prepare(Chat(user("x" * length)), SamplingParams()))
    assert prepared.prompt == f"<{'x' * length}>"


@pytest.mark.feature("tools")
def test_tools_are_shown_whatever_the_choice() -> None:
    """Pinned: ``none`` leaves the prompt as it is, so that turns share their prefix; calls are not parsed then."""
    auto = prepare(chat_templates.HERMES, user(), tools=TOOLS)
    none = prepare(chat_templates.HERMES, user(), tools=TOOLS, tool_choice="none")
    assert auto.prompt == none.prompt
    assert '"name": "f"' in auto.prompt
    text = spell("hermes", [Said("f", '{"a": 1}')])
    assert read(auto.new_parser(), [text]).calls
    assert shown(read(none.new_parser(), [text])) == (text, None, [])


@pytest.mark.feature("tools", "structured output")
def test_cht_02_required_and_named_have_a_grammar() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        prepared = prepare(chat_templates.HERMES, user(), tools=TOOLS, tool_choice=choice)
        assert prepared.params.structured_outputs is not None
        assert prepared.params.structured_outputs.grammar is not None
        assert prepared.params.structured_outputs.after_reasoning
    assert prepare(chat_templates.LLAMA3, user(), tools=TOOLS).params.structured_outputs is None


def test_cht_02_a_server_without_tool_parser_refuses_to_force_calls() -> None:
    chats = conversations(chat_templates.HERMES, tool_parser="none")
    with pytest.raises(RequestError, match="switched off"):
        chats.prepare_now(Chat(user(), tools=TOOLS, tool_choice="required"), SamplingParams())
    auto = chats.prepare_now(Chat(user(), tools=TOOLS), SamplingParams())
    text = spell("hermes", [Said("f", '{"a": 1}')])
    assert shown(read(auto.new_parser(), [text])) == (text, None, [])


@pytest.mark.feature("tools")
def test_cht_03_one_call_at_most_if_they_are_not_parallel() -> None:
    text = spell("hermes", [Said("f", '{"a": 1}'), Said("f", '{"a": 2}')])
    prepared = prepare(chat_templates.HERMES, user(), tools=TOOLS, parallel_tool_calls=False)
    assert [call.arguments for call in read(prepared.new_parser(), [text]).calls] == ['{"a": 1}']
    both = prepare(chat_templates.HERMES, user(), tools=TOOLS)
    first, second = read(both.new_parser(), [text]), read(both.new_parser(), [text])
    assert len({call.id for call in [*first.calls, *second.calls]}) == 4


@pytest.mark.feature("reasoning")
@pytest.mark.parametrize(
    ("template", "kwargs", "text", "reasoning", "content"),
    [
        (chat_templates.HERMES, {}, "<think>\na\n</think>\n\nb", "a", "b"),
        (chat_templates.HERMES, {}, "b", None, "b"),
        (chat_templates.HERMES, {"enable_thinking": False}, "b", None, "b"),
        (chat_templates.THINKING, {}, "a\n</think>\n\nb", "a", "b"),
        (chat_templates.DEEPSEEK_V31, {"thinking": True}, "a</think>b", "a", "b"),
        (chat_templates.DEEPSEEK_V31, {}, "b", None, "b"),
        (chat_templates.DEEPSEEK_V3, {}, "<think>\na</think>b", "a", "b"),
    ],
)
def test_reasoning_begins_where_the_prompt_says(
    template: str, kwargs: dict[str, Any], text: str, reasoning: str | None, content: str
) -> None:
    prepared = prepare(template, user(), template_kwargs=kwargs)
    assert shown(read(prepared.new_parser(), list(text))) == (content, reasoning, [])


@pytest.mark.feature("reasoning")
def test_reasoning_effort() -> None:
    """``none`` switches the reasoning off where templates can, other values on; explicit variables win."""
    off = prepare(chat_templates.HERMES, user(), reasoning_effort="none")
    assert off.prompt.endswith("</think>\n\n")
    assert prepare(chat_templates.DEEPSEEK_V31, user(), reasoning_effort="low").prompt.endswith("<think>")
    kwargs = {"enable_thinking": True}
    on = prepare(chat_templates.HERMES, user(), reasoning_effort="none", template_kwargs=kwargs)
    assert on.prompt.endswith("assistant\n")
    shows = prepare("{{ reasoning_effort }}", user(), reasoning_effort="high")
    assert shows.prompt == "high"
    assert refusal(STRINGS, user(), reasoning_effort="huge").param == "reasoning_effort"


@pytest.mark.feature("reasoning")
def test_a_message_to_continue_may_end_within_the_reasoning() -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}

    def answer(content: str) -> tuple[Any, ...]:
        history = [*user("<think>"), {"role": "assistant", "content": content}]
        prepared = prepare(chat_templates.HERMES, history, **options)
        assert prepared.prompt.endswith(content)
        return shown(read(prepared.new_parser(), ["a</think>b"]))

    assert answer("<think>I see") == ("b", "a", [])
    assert answer("<think>I see</think>So") == ("a</think>b", None, [])
    assert answer("So") == ("a</think>b", None, [])


@pytest.mark.feature("reasoning", "structured output")
def test_a_form_holds_after_the_reasoning_of_models_that_reason() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))
    thinks = prepare(chat_templates.HERMES, user(), params).params.structured_outputs
    plain = prepare(chat_templates.LLAMA3, user(), params).params.structured_outputs
    assert thinks == StructuredOutputs(regex="a+", after_reasoning=True)
    assert plain == StructuredOutputs(regex="a+")


class _Marked(ByteTokenizer):
    """BYTE-TOK with the marks of Mistral's calls as special tokens."""

    def __init__(self) -> None:
        super().__init__(("[TOOL_CALLS]", "[INST]"))
        self.special_ids = frozenset({*self.special_ids, 264, 265})


@pytest.mark.feature("tools")
def test_marks_that_are_special_tokens_are_decoded_and_others_hidden() -> None:
    chats = conversations(chat_templates.MISTRAL, _Marked())
    prepared = chats.prepare_now(Chat(user(), tools=TOOLS), SamplingParams())
    assert not prepared.params.skip_special_tokens
    text = "a[INST]b<|eos|>" + spell("mistral list", [Said("f", '{"a": 1}')])
    assert shown(read(prepared.new_parser(), list(text))) == ("ab", None, [("f", '{"a": 1}')])
    without = chats.prepare_now(Chat(user()), SamplingParams())
    assert without.params.skip_special_tokens
    wanted = chats.prepare_now(Chat(user(), tools=TOOLS), SamplingParams(skip_special_tokens=False))
    assert shown(read(wanted.new_parser(), ["a[INST]b"])) == ("a[INST]b", None, [])


def test_marks_that_are_ordinary_tokens_need_nothing() -> None:
    prepared = prepare(chat_templates.HERMES, user(), tools=TOOLS)
    assert prepared.params.skip_special_tokens


def test_another_template_by_setting(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ bos_token }}({{ messages[0].content }})", encoding="utf-8")
    chats = conversations(chat_templates.HERMES, chat_template=str(file))
    assert chats.prepare_now(Chat(user("é")), SamplingParams()).prompt == "<s>(é)"
    with pytest.raises(ConfigError, match="cannot be read"):
        conversations(STRINGS, chat_template=str(tmp_path / "missing"))


def test_special_tokens_of_users_cannot_be_made_plain_with_every_tokenizer() -> None:
    with pytest.raises(ConfigError, match="plain_special_tokens"):
        conversations(STRINGS, plain_special_tokens=True)


def test_documents_and_variables_reach_the_template() -> None:
    template = "{{ documents | tojson }}{{ x }}"
    prepared = prepare(template, user(), documents=[{"text": "d"}], template_kwargs={"x": 1})
    assert prepared.prompt == json.dumps([{"text": "d"}]) + "1"
    assert "cannot be set" in str(refusal(template, user(), template_kwargs={"tools": 1}))


def test_an_engine_without_tokenizer_refuses_chats() -> None:
    chats = Conversations(None, ChatTemplate({"default": STRINGS}), ServerConfig())
    with pytest.raises(RequestError, match="no tokenizer"):
        chats.prepare_now(Chat(user()), SamplingParams())
