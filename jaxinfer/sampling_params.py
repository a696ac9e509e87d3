"""What a user may ask of one generation: names and defaults, checked when the object is made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxinfer.param_checks import Checks, InvalidParamsError
from jaxinfer.param_rules import OutputKind, RepetitionDetection, normalise
from jaxinfer.structured.spec import StructuredOutputs

__all__ = [
    "InvalidParamsError",
    "OutputKind",
    "RepetitionDetection",
    "SamplingParams",
    "StructuredOutputs",
    "validate_for_model",
]

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of a generation, with the names and defaults of vLLM's.

    Sequences may be given as lists, ``stop`` also as one string, and None stands for none; they are kept as
    tuples. A temperature below 1e-5, ``top_p=0`` and ``top_k=1`` mean greedy decoding, which takes the lowest
    id among equally likely tokens.

    Attributes:
        n: choices per prompt, each with its own random stream.
        presence_penalty, frequency_penalty: from -2 to 2, on output tokens.
        repetition_penalty: above 0; 1 is off. On prompt and output tokens.
        temperature: from 0 to 2.
        top_p: from 0 to 1.
        top_k: 0, -1 and None are off. Tokens tied with the k-th are kept.
        min_p: smallest share of the largest probability.
        seed: any signed 64-bit integer, -1 included; None draws fresh entropy for each sequence.
        stop: strings that end the text.
        stop_token_ids: token ids that end it.
        ignore_eos: go on after the model's end tokens.
        max_tokens: most tokens to generate; 0 only scores the prompt, None uses the room left.
        min_tokens: end tokens are banned, and stop strings ignored, until this many tokens exist.
        logprobs, prompt_logprobs: most likely tokens to report per output or prompt position, 0 to 20; the
            token at the position is always reported.
        logprob_token_ids: further tokens to report per output position.
        prompt_logprob_token_ids: one list of tokens per prompt position, from ``prompt_logprob_start`` on; -1
            pads. Implies ``prompt_logprobs=0`` if that is None.
        logprobs_mode: of the model ("raw"), or of the law that was sampled from ("processed"; a greedy row's
            at temperature 1).
        flat_logprobs: report them as arrays rather than objects.
        detokenize: False leaves the text empty.
        skip_special_tokens, spaces_between_special_tokens, include_stop_str_in_output: of the text.
        output_kind, stream_interval: what outputs hold, and how many tokens apart they come.
        logit_bias: added to the logits of tokens; clamped to +-100.
        allowed_token_ids: all others are banned.
        bad_words: texts that must not be generated, with and without a leading space.
        repetition_detection: ends loops; a mapping is accepted.
        structured_outputs: the form of the answer; a mapping is accepted. An answer that is complete ends with
            ``stop``, whatever ``min_tokens`` and ``ignore_eos`` say.
        thinking_token_budget: most tokens between ``<think>`` and ``</think>``; then the end is forced. -1 and None
            are off, 0 ends it at once. Of no effect on an answer whose form holds from the first token.
        extra_args: for user extensions; JSON-like.
        skip_reading_prefix_cache: None decides by itself: True where prompt log-probabilities are asked for.

    Raises:
        InvalidParamsError: a ValueError that lists every problem.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprob_token_ids: Sequence[Sequence[int]] | None = None
    prompt_logprob_start: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = OutputKind.CUMULATIVE
    stream_interval: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    repetition_detection: RepetitionDetection | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: int | None = None
    extra_args: Mapping[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        for name, value in normalise(vars(self)).items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_p == 0 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Whether the sampler must know which tokens occurred."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def wants_logprobs(self) -> bool:
        """Whether sampled tokens are reported with log-probabilities."""
        return self.logprobs is not None or bool(self.logprob_token_ids)


def validate_for_model(
    params: SamplingParams,
    vocab_size: int,
    max_model_len: int | None = None,
    eos_token_ids: Sequence[int] = (),
) -> None:
    """Checks what only the model can tell: that token ids are in its vocabulary and that something may be
    sampled.

    Args:
        params: valid by themselves.
        vocab_size: V.
        max_model_len: tokens of prompt and output together; None skips the check of prompt rows.
        eos_token_ids: end tokens, which ``min_tokens`` bans.

    Raises:
        InvalidParamsError: lists every field that does not fit the model.
    """
    checks = Checks()
    named = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": tuple(params.logit_bias or ()),
        "allowed_token_ids": params.allowed_token_ids or (),
        "logprob_token_ids": params.logprob_token_ids or (),
        "prompt_logprob_token_ids": [max(row, default=-1) for row in params.prompt_logprob_token_ids or ()],
    }
    for field, ids in named.items():
        largest = max(ids, default=-1)
        if largest >= vocab_size:
            checks.fail(
                field, f"a list with token id {largest}", f"ids of the vocabulary, 0 to {vocab_size - 1}"
            )
    rows = len(params.prompt_logprob_token_ids or ())
    if max_model_len is not None and rows + (params.prompt_logprob_start or 0) > max_model_len:
        checks.fail(
            "prompt_logprob_token_ids", f"a list of {rows} rows", f"rows within {max_model_len} tokens"
        )
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    if params.min_tokens > 0 and ends and set(params.allowed_token_ids or range(vocab_size)) <= ends:
        checks.fail(
            "allowed_token_ids", "a list of end tokens only", "another token too, as min_tokens is above 0"
        )
    checks.raise_if_any()
