"""Keeps text of users that looks like a control token from becoming one."""

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

from jaxinfer.tokenization.tokenizer import HFTokenizer, without_surrogates

_OPEN, _CLOSE = (
    "\ue002",
    "\ue003",
)  # private use: no model was trained on them, and they are taken out of all input
_KEEP = ("role", "type", "id", "tool_call_id")


class ControlTokenGuard:
    """Encodes chats in which ``<|im_end|>`` and the like, where a user wrote them, are plain text.

    Without it a conversation is encoded as the template prints it, and any text that spells a control token
    is one, as with ``apply_chat_template``. With it, ``mark`` the messages before rendering, and ``encode``
    the result. Construction builds a second tokenizer without added tokens; do it once, at the start.
    """

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder()
        self._ids = {token.content: token_id for token_id, token in added.items() if token.content}
        tokens = "|".join(map(re.escape, sorted(self._ids, key=len, reverse=True))) or "(?!)"
        self._token = re.compile(tokens)
        self._part = re.compile(f"{_OPEN}(?P<plain>{tokens}){_CLOSE}|(?P<token>{tokens})|[{_OPEN}{_CLOSE}]")
        state = json.loads(tokenizer.backend.to_str())
        self._plain = Backend.from_str(json.dumps(state | {"added_tokens": [], "post_processor": None}))

    def mark(self, value: Any) -> Any:
        """A copy of messages, tools or documents in which control tokens within strings are marked.

        Args:
            value: JSON data. Keys of objects, and the fields role, type and ids, are left as they are.
        """
        if isinstance(value, str):
            clean = value.replace(_OPEN, "").replace(_CLOSE, "")
            return self._token.sub(lambda match: f"{_OPEN}{match[0]}{_CLOSE}", clean)
        if isinstance(value, Mapping):
            return {key: item if key in _KEEP else self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered chat: what is marked is plain text, other control tokens are tokens, no BOS is
        added.
        """
        if _OPEN not in text and _CLOSE not in text:
            return self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        stretch: list[
            str
        ] = []  # plain text since the last control token; a mark that lost its partner is dropped
        position = 0
        for match in self._part.finditer(text):
            stretch.append(text[position : match.start()])
            position = match.end()
            if match["token"] is not None:
                ids += [*self._encode_plain(stretch), self._ids[match["token"]]]
                stretch = []
            elif match["plain"] is not None:
                stretch.append(match["plain"])
        return ids + self._encode_plain([*stretch, text[position:]])

    def _encode_plain(self, stretch: list[str]) -> list[int]:
        return list(self._plain.encode(without_surrogates("".join(stretch)), add_special_tokens=False).ids)
