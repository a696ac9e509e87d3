"""From the fields of a request to what the engine is asked."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ServerConfig
from jaxinfer.request import RequestError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.structured.spec import StructuredOutputs
from serve.protocol.common import ResponseFormat, SamplingFields, StructuredFields

_PASSED_ON = {
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
    "prompt_logprobs",
    "logprobs_mode",
    "thinking_token_budget",
    "repetition_detection",
}
"""Fields of a request that are fields of ``SamplingParams``."""


def check_counts(fields: SamplingFields, limits: ServerConfig) -> None:
    """Checks what could make a small request expensive, before anything is done in proportion to it.

    Raises:
        RequestError: names the field.
    """
    counts = {
        "n": (fields.n or 0, limits.max_choices),
        "stop": (len(fields.stop or ()), limits.max_stop_strings),
        "bad_words": (len(fields.bad_words or ()), limits.max_bad_words),
    }
    for name, (given, most) in counts.items():
        if given > most:
            raise RequestError(f"{name}: {given} given, this server allows {most}", name)


def sampling_params(
    fields: SamplingFields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structured_outputs: StructuredOutputs | None = None,
    detokenize: bool = True,
) -> SamplingParams:
    """What a request asks for: its own values, then the model's ``generation_config.json``, then OpenAI's defaults.

    Args:
        defaults: ``EngineClient.sampling_defaults``.
        max_tokens, logprobs: differ between the endpoints.
        structured_outputs: see ``output_form``.
        detokenize: False for a model without a tokenizer.

    Raises:
        InvalidParamsError: lists every field that is out of range.
    """
    given = fields.model_dump(include=_PASSED_ON, exclude_none=True)
    return SamplingParams(
        **{**defaults, **given},
        max_tokens=max_tokens,
        logprobs=logprobs,
        structured_outputs=structured_outputs,
        detokenize=detokenize,
    )


def output_form(
    structured: StructuredFields | None, response_format: ResponseFormat | None
) -> StructuredOutputs | None:
    """The form of the answer that either field asks for.

    Raises:
        RequestError: both ask for one, or the schema is missing.
        InvalidParamsError: ``structured_outputs`` is not valid.
    """
    wanted = None if response_format is None or response_format.type == "text" else response_format
    if structured is not None:
        if wanted is not None:
            raise RequestError("structured_outputs and response_format exclude each other", "response_format")
        given = structured.model_dump(by_alias=True, exclude_none=True)
        return StructuredOutputs(**given)
    if wanted is None:
        return None
    if wanted.type == "json_object":
        return StructuredOutputs(json_object=True)
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise RequestError("response_format: json_schema.schema is missing", "response_format")
    return StructuredOutputs(json=wanted.json_schema.schema_)


def truncated(
    ids: list[int], fields: SamplingFields, max_model_len: int, max_tokens: int | None
) -> list[int]:
    """The prompt as ``truncate_prompt_tokens`` asks for it; its end is kept unless ``truncation_side`` is right.

    -1 leaves room in the context for ``max_tokens``, and for one token at least unless nothing is generated.
    """
    most = fields.truncate_prompt_tokens
    if most is None:
        return ids
    if most == -1:
        most = max(max_model_len - (1 if max_tokens is None else max_tokens), 1)
    if len(ids) <= most:
        return ids
    return ids[:most] if fields.truncation_side == "right" else ids[len(ids) - most :]
