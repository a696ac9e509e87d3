"""Chat templates: a conversation becomes the prompt text that a model was trained on."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from jaxinfer.tokenization.chat_messages import ChatTemplateError, join_parts, normalize_messages
from jaxinfer.tokenization.template_environment import template_environment

__all__ = ["ChatTemplate", "ChatTemplateError"]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_CONTINUE_MARK = "\ue000continue-here\ue001 "  # the space shows whether the template trims its contents
_PROBE = "\ue000probe\ue001"


class ChatTemplate:
    """The chat templates of a model, by name (``default``, ``tool_use``, ``rag``, ...).

    A model without templates, and a template that is not valid Jinja, are no error until something is
    rendered: plain completions work without them.

    Args:
        templates: source by name.
        special_tokens: what templates know as ``bos_token``, ``eos_token``, ...
        now: the clock behind ``strftime_now``.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._sources = dict(templates)
        self._special_tokens = dict(special_tokens or {})
        self._environment = template_environment(now)
        self._compiled: dict[str, jinja2.Template] = {}
        self._accepted: dict[tuple[str, str, bool], bool] = {}

    @property
    def sources(self) -> Mapping[str, str]:
        return self._sources

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return self._special_tokens

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        template_name: str | None = None,
    ) -> str:
        """The prompt text of a conversation. Encode it with ``add_special_tokens=False``: it has its own BOS.

        Contents that are lists of text parts are passed as lists if the template handles lists for that role,
        and otherwise joined, one part a line. Strings become lists of one part if the template handles only
        lists. The role ``developer`` is passed as ``system`` unless the template names it.

        Args:
            tools: function schemas, as in the OpenAI API.
            continue_final_message: the text ends within the last message, which the model continues.
            template_kwargs: further variables of the template.
            template_name: default: ``tool_use`` if there are tools and such a template, else ``default``.

        Raises:
            ChatTemplateError: no template; a malformed conversation; whatever the template raises.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other")
        extra = dict(template_kwargs or {})
        reserved = [key for key in extra if key in _RESERVED]
        if reserved:
            raise ChatTemplateError(f"chat_template_kwargs: {', '.join(reserved)} cannot be set there")
        name = self._select(template_name, bool(tools))
        prepared = self._prepare(name, messages)
        if continue_final_message:
            _mark_end(prepared[-1])
        variables = {
            **self._special_tokens,
            **extra,
            "messages": prepared,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(name, variables)
        return _cut_at_mark(text) if continue_final_message else text

    def _select(self, name: str | None, has_tools: bool) -> str:
        if not self._sources:
            raise ChatTemplateError(
                "the model has no chat template; give one to the server, or use the completions endpoint"
            )
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            known = ", ".join(sorted(self._sources))
            raise ChatTemplateError(f"the model has no chat template called {name!r}; it has: {known}")
        return name

    def _run(self, name: str, variables: Mapping[str, Any]) -> str:
        try:
            if name not in self._compiled:
                self._compiled[name] = self._environment.from_string(self._sources[name])
            return self._compiled[name].render(variables)
        except (
            Exception
        ) as error:  # a template can raise anything; all of it is the request's or the model's fault
            raise ChatTemplateError(f"chat template: {error}") from error

    def _prepare(self, name: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        prepared = normalize_messages(messages)
        for index, message in enumerate(prepared):
            message["role"] = self._role(name, message["role"], f"messages[{index}].role")
            content = message["content"]
            if isinstance(content, list) and not self._accepts(name, message["role"], as_list=True):
                message["content"] = join_parts(content)
            elif isinstance(content, str) and self._wants_lists(name):
                message["content"] = [{"type": "text", "text": content}]
        return prepared

    def _role(self, name: str, role: str, where: str) -> str:
        named = f"'{role}'" in self._sources[name] or f'"{role}"' in self._sources[name]
        if role == "developer" and not named:
            return "system"
        if role not in _ROLES and not named:
            raise ChatTemplateError(f"{where}: {role!r} is not known; allowed: {', '.join(_ROLES)}")
        return role

    def _wants_lists(self, name: str) -> bool:
        return not self._accepts(name, "user", as_list=False) and self._accepts(name, "user", as_list=True)

    def _accepts(self, name: str, role: str, as_list: bool) -> bool:
        """Whether a template shows the text of such a content, and none of its structure; found by trying."""
        key = (name, role, as_list)
        if key not in self._accepted:
            content: Any = [{"type": "text", "text": _PROBE}] if as_list else _PROBE
            filler: Any = "x"
            if role != "user" and self._wants_lists(name):
                filler = [{"type": "text", "text": "x"}]
            variables = {
                **self._special_tokens,
                "messages": _probe_conversation(role, content, filler),
                "tools": None,
                "documents": None,
                "add_generation_prompt": False,
            }
            self._accepted[key] = self._shows_probe(name, variables)
        return self._accepted[key]

    def _shows_probe(self, name: str, variables: Mapping[str, Any]) -> bool:
        try:
            text = self._run(name, variables)
        except ChatTemplateError:
            return False
        quoted = (f"'{_PROBE}'", f'"{_PROBE}"')
        return _PROBE in text and not any(quote in text for quote in quoted)


def _probe_conversation(role: str, content: Any, filler: Any) -> list[dict[str, Any]]:
    user, probe = {"role": "user", "content": filler}, {"role": role, "content": content}
    if role == "user":
        return [probe]
    if role in ("system", "developer"):
        return [probe, user]
    if role in ("tool", "function"):
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
        calling = {"role": "assistant", "content": filler, "tool_calls": [call]}
        return [user, calling, {**probe, "name": "f", "tool_call_id": "call00000"}]
    return [user, probe, user]


def _mark_end(message: dict[str, Any]) -> None:
    content = message["content"]
    if not content:
        raise ChatTemplateError("continue_final_message: the last message has no text to continue")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_MARK
    else:
        content[-1]["text"] += _CONTINUE_MARK


def _cut_at_mark(text: str) -> str:
    """What comes before the mark; a template that trims contents has the end of the text trimmed too."""
    start = text.rfind(_CONTINUE_MARK.strip())
    if start < 0:
        raise ChatTemplateError(
            "continue_final_message: the template does not show the end of the last message"
        )
    return text[:start] if text.startswith(_CONTINUE_MARK, start) else text[:start].rstrip()
