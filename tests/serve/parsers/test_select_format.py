"""Which parser a model gets."""

import pytest

from serve.parsers.select import reasons, select_tool_format, special_strings
from tests.support import chat_templates
from tests.support.tokenizers import ByteTokenizer


@pytest.mark.parametrize(
    ("template", "name", "thinks"),
    [
        (chat_templates.HERMES, "hermes", True),
        (chat_templates.THINKING, "hermes", True),
        (chat_templates.LLAMA3, "llama3_json", False),
        (chat_templates.MISTRAL, "mistral", False),
        (chat_templates.DEEPSEEK_V3, "deepseek", True),
        (chat_templates.DEEPSEEK_V31, "deepseek", True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "json", False),
        ("<tool_call>\n<function=name>", "json", False),
        ("<tool_call>name\n<arg_key>", "json", False),
    ],
)
def test_auto_goes_by_the_template(template: str, name: str, thinks: bool) -> None:
    """Formats that are not known (calls as XML) fall back to the generic one."""
    chosen = select_tool_format("auto", {"default": template}, ())
    assert chosen is not None
    assert chosen.name == name
    assert reasons("auto", {"default": template}, ()) is thinks


@pytest.mark.parametrize(
    ("special", "name"),
    [
        ("[TOOL_CALLS]", "mistral"),
        ("<tool_call>", "hermes"),
        ("<|python_tag|>", "llama3_json"),
        ("<｜tool▁call▁begin｜>", "deepseek"),
        ("<|other|>", "json"),
    ],
)
def test_auto_goes_by_special_tokens_if_the_template_says_nothing(special: str, name: str) -> None:
    chosen = select_tool_format("auto", {}, (special, "</s>"))
    assert chosen is not None
    assert chosen.name == name
    assert reasons("auto", {}, ("<think>",))


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "deepseek", "json"])
def test_a_setting_wins(name: str) -> None:
    chosen = select_tool_format(name, {"default": chat_templates.HERMES}, ())
    assert chosen is not None
    assert chosen.name == name
    assert select_tool_format("none", {"default": chat_templates.HERMES}, ()) is None
    assert not reasons("none", {"default": chat_templates.HERMES}, ())
    assert reasons("think", {}, ())


def test_the_forms_of_a_family_follow_the_template() -> None:
    old = select_tool_format("auto", {"default": chat_templates.MISTRAL}, ())
    new = select_tool_format("auto", {"default": "[TOOL_CALLS] [ARGS]"}, ())
    fenced = select_tool_format("auto", {"default": chat_templates.DEEPSEEK_V3}, ())
    plain = select_tool_format("auto", {"default": chat_templates.DEEPSEEK_V31}, ())
    assert old is not None
    assert new is not None
    assert fenced is not None
    assert plain is not None
    assert (old.form.between, new.form.between) == ('", "arguments": ', "[ARGS]")
    assert "```json" in fenced.form.between
    assert "```json" not in plain.form.between


def test_mistral_ids_have_nine_letters_and_digits() -> None:
    mistral = select_tool_format("mistral", {}, ())
    hermes = select_tool_format("hermes", {}, ())
    assert mistral is not None
    assert hermes is not None
    ids = {mistral.new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert hermes.new_id().startswith("call_")


def test_special_strings_of_a_vocabulary() -> None:
    assert special_strings(ByteTokenizer(("<think>",)))["<|eos|>"] == 257
    assert "<think>" not in special_strings(ByteTokenizer(("<think>",)))
