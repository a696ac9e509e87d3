"""Tokenizing beside the event loop where it would take long, and not at all where it cannot help."""

import asyncio
from collections.abc import Sequence
from functools import cached_property

from jaxinfer.engine.inputs import Limits
from jaxinfer.request import RequestError
from jaxinfer.tokenization.tokenizer import Tokenizer

LARGE_TEXT = 4096
"""Characters from which a text is tokenized on another thread."""


def need_tokenizer(tokenizer: Tokenizer | None, param: str) -> Tokenizer:
    """Raises:
    RequestError: the model is served without a tokenizer.
    """
    if tokenizer is None:
        raise RequestError("this model is served without a tokenizer: send token ids", param)
    return tokenizer


async def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of one text of any length."""
    if len(text) > LARGE_TEXT:
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
    return tokenizer.encode(text, add_special_tokens)


class PromptEncoder:
    """Encodes prompts for one model."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

    async def encode(
        self, texts: Sequence[str], add_special_tokens: bool = True, *, bounded: bool = True
    ) -> list[list[int]]:
        """Token ids of prompts.

        Args:
            bounded: refuse a text that cannot fit the context, before it is tokenized.

        Raises:
            RequestError: a text is longer than the context could be, were all its tokens the longest one.
        """
        if sum(map(len, texts)) <= LARGE_TEXT:
            return [self._tokenizer.encode(text, add_special_tokens) for text in texts]
        return await asyncio.to_thread(self._encode_large, texts, add_special_tokens, bounded)

    def _encode_large(self, texts: Sequence[str], add_special_tokens: bool, bounded: bool) -> list[list[int]]:
        most = self._limits.max_model_len * self._longest_token
        for text in texts:
            if bounded and len(text) > most:
                raise RequestError(
                    f"the prompt has {len(text)} characters; the context of {self._limits.max_model_len} tokens "
                    f"holds {most} at most",
                    "prompt",
                )
        return [self._tokenizer.encode(text, add_special_tokens) for text in texts]

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token; a character has one byte at least."""
        return max(len(self._tokenizer.token_bytes(i)) for i in range(self._tokenizer.vocab_size))
