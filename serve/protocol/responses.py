"""Requests of ``/v1/responses``, the stateless subset."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from serve.protocol.common import SCHEMA_NAME, Body, SamplingFields


class ResponseFunction(Body):
    """A function tool; ``parameters`` is a JSON schema."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The form of the text; a schema's fields are beside ``type`` here, not below it."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(default=None, pattern=SCHEMA_NAME)
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_is_given(self) -> Self:
        if self.type == "json_schema" and (self.name is None or self.json_schema is None):
            raise ValueError("json_schema needs name and schema")
        return self


class TextConfig(Body):
    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Body):
    """``summary`` is accepted, but no summaries are written: the reasoning itself is in the answer."""

    effort: str | None = Field(default=None, max_length=32)
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesStreamOptions(Body):
    """Deltas are never padded; the client's default asks for it and is accepted."""

    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingFields):
    """The body of a responses request.

    Nothing is kept on the server: fields that refer to kept things are refused, ``store`` is accepted because clients
    send it by default. Fields of one accepted value are there for the same reason.

    Attributes:
        input: the user's text, or items: messages, reasoning, function calls and their outputs.
        instructions: a system message in front.
        include: of ``message.output_text.logprobs`` and ``reasoning.encrypted_content``; the latter changes nothing.
        prompt_cache_key, safety_identifier, service_tier, client_metadata: not used.
    """

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: list[ResponseFunction] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    n: Literal[1] | None = None
    store: bool | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    client_metadata: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    @field_validator("input")
    @classmethod
    def _is_not_empty(cls, given: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if not given:
            raise ValueError("there is nothing in it")
        return given
