"""What the generating endpoints share: sampling fields of requests, and parts of answers.

Requests are strict: a number is not a string and not a boolean, and an unknown field is an error. ``null`` is the same
as absent. Fields that have only one accepted value are there because well-known clients send that value.
"""

from typing import Annotated, Any, Literal, Self

from msgspec import UNSET, Struct, UnsetType
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from jaxinfer.sampling.limits import MAX_LOGIT_BIAS

MAX_ID_LENGTH = 128
MAX_TOKEN_IDS = 2**20
MAX_FIELDS = 256
SCHEMA_NAME = r"^[a-zA-Z0-9_-]{1,64}$"
SALT_PATTERN = r"^[^@/\\\x00]+$"


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Strings = Annotated[
    list[str],
    Field(fail_fast=True),
    BeforeValidator(_as_list),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""One string stands for a list of one."""

TokenIds = Annotated[list[int], Field(fail_fast=True, max_length=MAX_TOKEN_IDS)]


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"{len(value)} entries; at most {MAX_LOGIT_BIAS} are allowed")
    return value


LogitBias = Annotated[dict[str, float], BeforeValidator(_few)]


class Body(BaseModel):
    """Strict, without unknown fields; a field that is null is absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:  # each of them would make an error of its own
            raise ValueError(f"{len(data)} fields; no more than {MAX_FIELDS} are known")
        return {name: value for name, value in data.items() if value is not None}


class StreamOptions(Body):
    """Attributes:
    include_usage: a last chunk without choices carries the usage.
    continuous_usage_stats: every chunk carries the usage so far; only with ``include_usage``.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @model_validator(mode="after")
    def _continuous_needs_usage(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats: only with include_usage=true")
        return self


class JsonSchemaFormat(Body):
    """A named schema; ``strict`` makes no difference, schemas are always enforced."""

    name: str | None = Field(default=None, pattern=SCHEMA_NAME)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer. ``json_schema`` goes with the type of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredFields(Body):
    """See ``StructuredOutputs``."""

    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, max_length=4096)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


class RepetitionFields(Body):
    """See ``RepetitionDetection``."""

    max_pattern_size: int
    min_pattern_size: int | None = None
    min_count: int | None = None


class SamplingFields(Body):
    """Attributes:
    model: one of the served names; absent: the first of them.
    seed: any signed 64-bit number.
    request_id: names the request; a second one with the same id at the same time is refused.
    priority: smaller is more urgent.
    cache_salt: requests share cached prefixes only under equal salts.
    stream_interval: tokens of a choice per chunk; the first and the last ones come at once.
    return_tokens_as_token_ids: tokens in log-probabilities are spelled ``token_id:ID``.
    return_token_ids: answers carry the ids of prompt and output.
    return_metrics: answers carry the request's times; for a single choice.
    truncate_prompt_tokens: keep so many tokens of the prompt, at most; -1: as many as the context admits.
    truncation_side: which side of the prompt is cut.
    logprobs_mode: of the model, or of the law that was sampled from.
    user: not used.
    best_of, use_beam_search, length_penalty: sent by clients; only the value that means nothing is accepted.
    """

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: Strings | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    logprob_token_ids: TokenIds | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    structured_outputs: StructuredFields | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionFields | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    request_id: str | None = Field(default=None, min_length=1, max_length=MAX_ID_LENGTH)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=128, pattern=SALT_PATTERN)
    stream_interval: int | None = Field(default=None, ge=1)
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_metrics: bool | None = None
    user: str | None = None
    best_of: Literal[1] | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: float | None = Field(default=None, ge=1.0, le=1.0)


# ---- parts of answers


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class Logprob(Struct):
    """A token of a chat answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Metrics(Struct):
    """Times of one request in milliseconds; None for what did not happen.

    Attributes:
        time_to_first_token_ms: from arrival at the engine.
        queue_time_ms, prefill_time_ms: its two parts.
        generation_time_ms: from the first token to the last.
        mean_itl_ms: time per output token behind the first.
        tokens_per_second: of the generation.
        num_draft_tokens, num_accepted_tokens: drafts that were verified, and those of them that were right.
    """

    queue_time_ms: float | None
    prefill_time_ms: float | None
    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    num_preemptions: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
