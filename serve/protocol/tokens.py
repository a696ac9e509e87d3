"""Requests and answers of ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from typing import Annotated, Any, Self

from msgspec import UNSET, Struct, UnsetType
from pydantic import Field, model_validator

from serve.protocol.common import Body, TokenIds


class TokenizeRequest(Body):
    """Text, or a conversation that is put through the chat template first.

    Attributes:
        add_special_tokens: absent: true for text, false for conversations, whose template writes them.
        return_token_strs: also answer the tokens as the vocabulary spells them.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(Body):
    """``skip_special_tokens`` leaves special tokens out of the text."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False


class Detokenized(Struct):
    prompt: str


class TokenizerInfo(Struct):
    """Attributes:
    vocab_size: of the tokenizer; ``model_vocab_size`` of the model, which may be padded.
    add_bos: whether text gets a BOS token in front.
    """

    vocab_size: int
    model_vocab_size: int
    bos_token_id: int | None
    bos_token: str | None
    eos_token_ids: list[int]
    eos_token: str | None
    add_bos: bool
    chat_template: str | None
    max_model_len: int
