"""From a chat to what the engine is asked, and how its text is read: shared by chat completions and responses.

One ``Conversations`` per server; per request one ``prepare``, then a parser per choice, fed with its text::

    conversations = Conversations(client.tokenizer, client.chat_template, config.server)
    prepared = await conversations.prepare(Chat(messages, tools=tools, tool_choice=choice), params)
    request = EngineRequest(request_id, prepared.prompt_token_ids, prepared.params)
    parser = prepared.new_parser()
    events = parser.push(text)                       # for each delta
    events += parser.finish()                        # with the last one
    reason = finish_reason(delta.finish_reason, parser.num_complete_calls, prepared.tools.choice == "named")
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxinfer.config import ServerConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.request import RequestError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenization.chat import ChatTemplate, ChatTemplateError
from jaxinfer.tokenization.control_tokens import ControlTokenGuard
from jaxinfer.tokenization.tokenizer import HFTokenizer, Tokenizer
from serve.parsers.base import OutputParser
from serve.parsers.calls import CallOutput
from serve.parsers.finish import finish_reason
from serve.parsers.functions import ToolUse, read_tool_use
from serve.parsers.pipeline import HiddenTokens, PlainParser, ReasoningParser, ToolParser
from serve.parsers.reasoning import THINK, THINK_END
from serve.parsers.select import ToolFormat, reasons, select_tool_format, special_strings
from serve.parsers.tool_grammar import tool_grammar

logger = logging.getLogger(__name__)

__all__ = ["Chat", "Conversations", "PreparedChat", "finish_reason"]

INLINE_CHARACTERS = 4096
"""Chats with more text are rendered and tokenized on a thread, so that the event loop is not held up."""
MAX_NESTING = 96
"""Levels of objects and lists in messages, tools, documents and variables of the template."""
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True)
class Chat:
    """A conversation as a client sent it; nothing is checked yet.

    Attributes:
        messages, tools, tool_choice: as in the chat completions API.
        parallel_tool_calls: None is True.
        template_kwargs: further variables of the template (``chat_template_kwargs``).
        reasoning_effort: a variable of the template; ``none`` also sets ``enable_thinking`` and ``thinking`` to False,
            and any other value sets them to True, unless ``template_kwargs`` has them.
        add_special_tokens: put the BOS token before the prompt; templates print their own.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool = False


@dataclass(frozen=True)
class PreparedChat:
    """Attributes:
    prompt: the rendered text, and ``prompt_token_ids`` its tokens.
    params: the request's, with the form that tools and reasoning ask for.
    tools: what may be called.
    reasoning: the text begins inside the reasoning, or may begin with it.
    """

    prompt: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    tools: ToolUse
    reasoning: bool
    _format: ToolFormat | None = field(repr=False)
    _hidden: tuple[str, ...] = field(repr=False)
    _inside: bool

    def new_parser(self) -> OutputParser:
        """A parser for the text of one choice."""
        parser: OutputParser = PlainParser()
        if self._format is not None:
            most = None if self.tools.parallel else 1
            parser = ToolParser(self._format.read, CallOutput(self.tools.names, self._format.new_id, most))
        if self.reasoning:
            parser = ReasoningParser(parser, self._inside)
        return HiddenTokens(parser, self._hidden) if self._hidden else parser


class Conversations:
    """Renders and tokenizes chats, and knows how the model writes calls and reasoning.

    Args:
        tokenizer: None: every chat is refused.
        template: the model's; ``settings.chat_template`` names a file that replaces it.

    Raises:
        ConfigError: the file cannot be read; ``plain_special_tokens`` with a tokenizer that cannot do it.
    """

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate, settings: ServerConfig) -> None:
        self._tokenizer = tokenizer
        self._template = _replaced(template, settings.chat_template)
        self._guard: ControlTokenGuard | None = None
        if settings.plain_special_tokens and tokenizer is not None:
            if not isinstance(tokenizer, HFTokenizer):
                raise ConfigError("server.plain_special_tokens: not possible with this tokenizer")
            self._guard = ControlTokenGuard(tokenizer)
        self._special = {} if tokenizer is None else special_strings(tokenizer)
        self._format = select_tool_format(settings.tool_parser, self._template.sources, self._special)
        self._shows_tools = any("tools" in source for source in self._template.sources.values())
        self._reasons = reasons(settings.reasoning_parser, self._template.sources, self._special)

    @property
    def tool_format(self) -> str | None:
        """Name of the format in which calls are read."""
        return None if self._format is None else self._format.name

    @property
    def reasons(self) -> bool:
        """Whether reasoning is split from the answers."""
        return self._reasons

    async def prepare(self, chat: Chat, params: SamplingParams) -> PreparedChat:
        """Everything that can be wrong with a chat is found here.

        Raises:
            RequestError: a field is not valid, or the template refuses the conversation.
        """
        data = (chat.messages, chat.tools, chat.documents, chat.template_kwargs)
        if _measure(data) <= INLINE_CHARACTERS:
            return self.prepare_now(chat, params)
        return await asyncio.to_thread(self.prepare_now, chat, params)

    def prepare_now(self, chat: Chat, params: SamplingParams) -> PreparedChat:
        """``prepare`` on this thread."""
        use = read_tool_use(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
        if use.forced and self._format is None:
            raise RequestError(
                "tool_choice: calls are switched off (server.tool_parser: none)", "tool_choice"
            )
        if use.functions and not self._shows_tools:
            self._shows_tools = True  # said once
            logger.warning("the chat template does not show tools to the model; only a forced call can work")
        prompt, ids = self._render(chat)
        tool_format = None if use.choice == "none" else self._format
        structured = params.structured_outputs
        if tool_format is not None:
            structured = tool_grammar(use, tool_format, self._special, structured)
        if structured is not None and self._reasons:
            structured = replace(structured, after_reasoning=True)
        hidden = self._hidden(tool_format) if params.skip_special_tokens else None
        return PreparedChat(
            prompt,
            tuple(ids),
            replace(
                params,
                structured_outputs=structured,
                skip_special_tokens=params.skip_special_tokens and hidden is None,
            ),
            use,
            self._reasons,
            tool_format,
            hidden or (),
            _opens_reasoning(chat, prompt),
        )

    def _render(self, chat: Chat) -> tuple[str, list[int]]:
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer, so chats cannot be served", "messages")
        guard = self._guard
        mark = guard.mark if guard is not None else _same
        try:
            prompt = self._template.render(
                mark(chat.messages),
                mark(chat.tools),
                chat.add_generation_prompt,
                chat.continue_final_message,
                mark(chat.documents),
                _template_kwargs(chat),
            )
        except ChatTemplateError as error:
            raise RequestError(str(error), "messages") from None
        if guard is None:
            return prompt, self._tokenizer.encode(prompt, add_special_tokens=chat.add_special_tokens)
        bos = self._tokenizer.encode("") if chat.add_special_tokens else []
        return prompt, bos + guard.encode(prompt)

    def _hidden(self, tool_format: ToolFormat | None) -> tuple[str, ...] | None:
        """Strings of special tokens to take out of the text if some must stay visible; None if none need to."""
        marks = {*(tool_format.marks if tool_format else ()), *((THINK, THINK_END) if self._reasons else ())}
        if marks.isdisjoint(self._special):
            return None
        return tuple(text for text in self._special if text not in marks)


def _replaced(template: ChatTemplate, path: str | None) -> ChatTemplate:
    if path is None:
        return template
    try:
        return ChatTemplate({"default": Path(path).read_text(encoding="utf-8")}, template.special_tokens)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"server.chat_template: {path} cannot be read: {error}") from None


def _template_kwargs(chat: Chat) -> dict[str, Any]:
    given = dict(chat.template_kwargs or {})
    effort = chat.reasoning_effort
    if effort is None:
        return given
    if effort not in REASONING_EFFORTS:
        raise RequestError(
            f"reasoning_effort: {effort!r:.80} is not known; allowed: {', '.join(REASONING_EFFORTS)}",
            "reasoning_effort",
        )
    thinking = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinking, "thinking": thinking, **given}


def _opens_reasoning(chat: Chat, prompt: str) -> bool:
    """Whether the prompt ends inside the reasoning: right behind its start tag, or within a message to continue."""
    if prompt.rstrip().endswith(THINK):
        return True
    if not chat.continue_final_message:
        return False
    last = prompt[prompt.rfind(THINK_END) + 1 :]
    message = str(chat.messages[-1].get("content"))
    return THINK in last and THINK in message and THINK_END not in message[message.rfind(THINK) :]


def _measure(value: object) -> int:
    """Characters of all strings within JSON data.

    Raises:
        RequestError: it is nested too deeply for templates.
    """
    total, level = 0, [value]
    for _ in range(MAX_NESTING):
        total += sum(len(item) for item in level if isinstance(item, str))
        level = [
            child
            for item in level
            if isinstance(item, Mapping | list | tuple)
            for child in (item.values() if isinstance(item, Mapping) else item)
        ]
        if not level:
            return total
    raise RequestError(f"messages, tools and documents: nested deeper than {MAX_NESTING} levels", "messages")


def _same(value: Any) -> Any:
    return value
