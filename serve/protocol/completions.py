"""Requests, answers and chunks of ``/v1/completions``."""

from typing import Annotated, Any, Self

from msgspec import UNSET, Struct, UnsetType
from pydantic import Field, WithJsonSchema, field_validator, model_validator

from jaxinfer.request import RequestError
from serve.protocol.common import Metrics, ResponseFormat, SamplingFields, StreamOptions, Usage

_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}

Prompts = list[str] | list[list[int]]


class CompletionRequest(SamplingFields):
    """Attributes:
    prompt: text, texts, token ids, or lists of token ids; ``read_prompts`` checks it.
    echo: answers begin with the prompt; its tokens are in the log-probabilities.
    logprobs: most likely tokens to report beside each token of the answer, 0 to 20.
    max_tokens: 16 if absent; 0, with ``echo``, only scores the prompt.
    suffix: not supported.
    add_special_tokens: whether texts are encoded with the tokenizer's special tokens, such as BOS.
    """

    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    echo: bool = False
    logprobs: int | None = None
    max_tokens: int = Field(default=16, ge=0)
    stream: bool = False
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool = True

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, suffix: str | None) -> str | None:
        if suffix is not None:
            raise ValueError("text cannot be inserted before a suffix; leave it out")
        return suffix

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 only with echo=true, which scores the prompt")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: only with stream=false")
        return self


def read_prompts(prompt: Any, max_prompts: int, field: str = "prompt") -> Prompts:
    """The prompts of a request, of one kind. What is inside a list of token ids is checked by the engine.

    Args:
        field: the request's name for them.

    Raises:
        RequestError: not one of the four forms, or too many.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise _wrong(field, f"it is of type {type(prompt).__name__}")
    if not prompt:
        raise _wrong(field, "it is an empty list")
    kind = type(prompt[0])
    if kind not in (str, list):
        return [prompt]
    if len(prompt) > max_prompts:
        raise RequestError(f"{field}: {len(prompt)} prompts given, this server allows {max_prompts}", field)
    for position, item in enumerate(prompt):
        if not isinstance(item, kind):
            shown = type(item).__name__
            raise _wrong(field, f"{field}[{position}] is of type {shown}, {field}[0] of type {kind.__name__}")
    return prompt


def _wrong(field: str, problem: str) -> RequestError:
    allowed = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
    return RequestError(f"{field} must be {allowed}; {problem}", field)


# ---- answers


class CompletionLogprobs(Struct):
    """One entry per token in each list.

    Attributes:
        text_offset: where the token begins in the text of the choice, in characters.
        token_logprobs, top_logprobs: null for the first token of an echoed prompt.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    """A choice, or what a chunk adds to one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[int, Any] | None] | UnsetType = UNSET


class CompletionAnswer(Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: str = "text_completion"
    metrics: Metrics | UnsetType = UNSET
