"""Which format of calls, and whether reasoning, belong to a model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxinfer.tokenization.tokenizer import Tokenizer
from serve.parsers.calls import call_id, short_call_id
from serve.parsers.formats import (
    ARGS,
    CALL_BEGIN,
    CALL_END,
    CALL_ID,
    CALL_SEP,
    CALLS_BEGIN,
    CALLS_END,
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALL_END,
    TOOL_CALLS,
    Format,
    deepseek,
    generic_json,
    hermes,
    llama3_json,
    mistral,
)
from serve.parsers.reasoning import THINK, THINK_END


@dataclass(frozen=True)
class CallForm:
    """How calls are written: ``opening``, calls with ``separator`` between them, ``closing``; a call is ``before``, the
    name, ``between``, the arguments, ``after``.

    Attributes:
        mark: what calls begin with; empty if they begin like any JSON.
    """

    before: str
    between: str
    after: str
    separator: str
    opening: str = ""
    closing: str = ""
    mark: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """Attributes:
    read: parses it.
    form: for a grammar that forces calls; ``read`` can read it.
    marks: strings that must be visible in the text.
    short_ids: call ids are nine letters and digits.
    """

    name: str
    read: Format
    form: CallForm
    marks: tuple[str, ...] = ()
    short_ids: bool = False

    def new_id(self) -> str:
        return short_call_id() if self.short_ids else call_id()


_HERMES = ToolFormat(
    "hermes",
    hermes,
    CallForm(f'{TOOL_CALL}\n{{"name": "', '", "arguments": ', f"}}\n{TOOL_CALL_END}", "\n", mark=TOOL_CALL),
    (TOOL_CALL, TOOL_CALL_END),
)
_LLAMA3 = ToolFormat(
    "llama3_json", llama3_json, CallForm('{"name": "', '", "parameters": ', "}", "; "), (PYTHON_TAG,)
)
_JSON = ToolFormat("json", generic_json, CallForm('{"name": "', '", "arguments": ', "}", ", ", "[", "]"))
_MISTRAL_MARKS = (TOOL_CALLS, CALL_ID, ARGS)
_MISTRAL_LIST = ToolFormat(
    "mistral",
    mistral,
    CallForm('{"name": "', '", "arguments": ', "}", ", ", f"{TOOL_CALLS}[", "]", TOOL_CALLS),
    _MISTRAL_MARKS,
    short_ids=True,
)
_MISTRAL = ToolFormat(
    "mistral", mistral, CallForm(TOOL_CALLS, ARGS, "", "", mark=TOOL_CALLS), _MISTRAL_MARKS, short_ids=True
)
_DEEPSEEK_MARKS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, CALL_SEP)
_DEEPSEEK_FENCED = ToolFormat(
    "deepseek",
    deepseek,
    CallForm(
        f"{CALL_BEGIN}function{CALL_SEP}",
        "\n```json\n",
        f"\n```{CALL_END}",
        "\n",
        CALLS_BEGIN,
        CALLS_END,
        CALLS_BEGIN,
    ),
    _DEEPSEEK_MARKS,
)
_DEEPSEEK = ToolFormat(
    "deepseek",
    deepseek,
    CallForm(CALL_BEGIN, CALL_SEP, CALL_END, "", CALLS_BEGIN, CALLS_END, CALLS_BEGIN),
    _DEEPSEEK_MARKS,
)
_OTHER_XML = ("<function=", "<arg_key>")
"""Templates that have ``<tool_call>``, but no JSON within it."""


def select_tool_format(
    setting: str, templates: Mapping[str, str], special: Iterable[str]
) -> ToolFormat | None:
    """The format of a model's calls.

    Args:
        setting: ``server.tool_parser``. ``auto`` goes by the marks that the templates print, then by the special tokens
            of the vocabulary, and falls back to ``json``, which any model can be made to write by a grammar.
        templates: sources of the chat templates.
        special: strings of the special tokens.

    Returns:
        None: calls are not parsed.
    """
    text = "\n".join(templates.values())
    mistral_format = _MISTRAL if ARGS in text else _MISTRAL_LIST
    deepseek_format = _DEEPSEEK_FENCED if "```json" in text else _DEEPSEEK
    named = {
        "hermes": _HERMES,
        "llama3_json": _LLAMA3,
        "mistral": mistral_format,
        "deepseek": deepseek_format,
        "json": _JSON,
        "none": None,
    }
    if setting != "auto":
        return named[setting]
    if TOOL_CALL in text and any(mark in text for mark in _OTHER_XML):
        return _JSON
    for haystack in (text, frozenset(special)):
        if TOOL_CALLS in haystack:
            return mistral_format
        if CALL_BEGIN in haystack:
            return deepseek_format
        if TOOL_CALL in haystack:
            return _HERMES
        if PYTHON_TAG in haystack:
            return _LLAMA3
    if '"parameters":' in text and "<|start_header_id|>" in text:
        return _LLAMA3
    return _JSON


def reasons(setting: str, templates: Mapping[str, str], special: Iterable[str]) -> bool:
    """Whether the model writes ``<think>`` blocks.

    Args:
        setting: ``server.reasoning_parser``. ``auto``: templates or special tokens name the tags.
        templates, special: as for ``select_tool_format``.
    """
    if setting != "auto":
        return setting == "think"
    text, tokens = "\n".join(templates.values()), frozenset(special)
    return any(mark in text or mark in tokens for mark in (THINK, THINK_END))


def special_strings(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens by the text that they show without ``skip_special_tokens``."""
    texts = {
        tokenizer.token_bytes(token).decode("utf-8", "replace"): token
        for token in sorted(tokenizer.special_ids)
    }
    texts.pop("", None)
    return texts
