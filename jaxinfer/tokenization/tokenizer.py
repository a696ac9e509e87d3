"""The tokenizer interface that the engine and the server use, and its implementation on ``tokenizers``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer as Backend

from jaxinfer.tokenization.decode_rules import DecodeRules, read_decoder


class Tokenizer(Protocol):
    """Text to token ids and back.

    Ids outside the vocabulary (the model's may be padded) decode to nothing; no method raises for them.

    Attributes:
        vocab_size: one more than the largest id of the tokenizer; the model's vocabulary may be larger.
        bos_token_id: None if the tokenizer has none.
        eos_token_ids: every id that ends a generation, the tokenizer's own first.
        special_ids: ids that ``skip_special_tokens`` hides.
        add_bos: whether ``encode`` puts the BOS token first; without it an empty prompt has no tokens.
        decode_rules: how text differs from the concatenated ``token_bytes``.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def add_bos(self) -> bool: ...

    @property
    def decode_rules(self) -> DecodeRules: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes the token adds to a text, before ``decode_rules``; for a special token its literal text."""
        ...

    def token_str(self, token_id: int) -> str:
        """The token as the vocabulary spells it, e.g. ``Ġthe``; empty outside the vocabulary."""
        ...


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that a tokenizer file does not carry itself. See ``Tokenizer`` for their meaning."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """One token alone as text, as shown in logprobs; partial characters become U+FFFD."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def without_surrogates(text: str) -> str:
    """Joins surrogate pairs; lone surrogates, which JSON can spell and UTF-8 cannot, become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class HFTokenizer:
    """``Tokenizer`` on a ``tokenizers`` object. Thread-safe: nothing is changed after construction but a
    cache.

    Raises:
        TokenizerError: the decoder of the backend is not supported.
    """

    def __init__(self, backend: Backend, special: SpecialTokens) -> None:
        self.backend = backend
        self._special = special
        self._to_bytes, self._rules = read_decoder(backend)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._vocab_size = max([backend.get_vocab_size(with_added_tokens=False), *(i + 1 for i in added)])
        self._bytes_of: list[bytes | None] = [None] * self._vocab_size
        self._add_bos = special.bos_token_id is not None and backend.encode("").ids[:1] == [
            special.bos_token_id
        ]

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self._special.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._special.eos_token_ids

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def add_bos(self) -> bool:
        return self._add_bos

    @property
    def decode_rules(self) -> DecodeRules:
        return self._rules

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = self.backend.encode(without_surrogates(text), add_special_tokens=add_special_tokens).ids
        return list(ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        known = [token_id for token_id in ids if 0 <= token_id < self._vocab_size]
        return str(self.backend.decode(known, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._vocab_size:
            return b""
        data = self._bytes_of[token_id]
        if data is None:
            data = self._bytes_of[token_id] = self._to_bytes(self.token_str(token_id))
        return data

    def token_str(self, token_id: int) -> str:
        if not 0 <= token_id < self._vocab_size:
            return ""
        return self.backend.id_to_token(token_id) or ""
