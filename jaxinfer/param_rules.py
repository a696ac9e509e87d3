"""The rules of sampling parameters: limits, normal forms and contradictions."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.param_checks import Checks, as_integer, as_number
from jaxinfer.sampling.limits import MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS
from jaxinfer.structured.spec import read_structured_outputs

MAX_CHOICES = 16384
MAX_STOP_STRINGS = 32
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128
MAX_STRING_CHARS = 1024
"""Length of a stop string or a bad word."""
MAX_TOKENS = 2**31 - 1
MAX_ALLOWED_TOKEN_IDS = 2**20
MAX_PROMPT_ROWS = 2**20
MAX_PATTERN = 1024
MAX_EXTRA_DEPTH = 16
MAX_EXTRA_ITEMS = 4096


class OutputKind(enum.Enum):
    """What each output of a request holds: all so far, what is new, or all and only once."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True)
class RepetitionDetection:
    """Ends a generation whose last tokens repeat a pattern.

    Attributes:
        max_pattern_size, min_pattern_size: tokens of the pattern.
        min_count: repetitions that end it.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        checks = Checks()
        checks.integer("max_pattern_size", self.max_pattern_size, 1, MAX_PATTERN)
        largest = as_integer(self.max_pattern_size) or MAX_PATTERN
        checks.integer("min_pattern_size", self.min_pattern_size, 0, max(largest, 0))
        checks.integer("min_count", self.min_count, 2, MAX_PATTERN)
        checks.raise_if_any()


_TEXT_FLAGS = (
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def normalise(given: Mapping[str, Any]) -> dict[str, Any]:
    """The normal form of every field: tuples for sequences, 0 for a top-k that is off, int and float numbers.

    Raises:
        InvalidParamsError: lists every problem; contradictions are looked for once all fields are right.
    """
    checks = Checks()
    sections = (_counts, _law, _stops, _logprobs, _constraints, _output)
    normal = {name: value for section in sections for name, value in section(given, checks).items()}
    assert normal.keys() == given.keys()
    if not checks.problems:
        _check_contradictions(normal, checks)
    checks.raise_if_any()
    return normal


def _counts(given: Mapping[str, Any], checks: Checks) -> dict[str, Any]:
    return {
        "n": checks.integer("n", given["n"], 1, MAX_CHOICES),
        "max_tokens": checks.optional_integer("max_tokens", given["max_tokens"], 0, MAX_TOKENS),
        "min_tokens": checks.integer("min_tokens", given["min_tokens"], 0, MAX_TOKENS),
        "seed": checks.optional_integer("seed", given["seed"], -(2**63), 2**63 - 1),
    }


def _law(given: Mapping[str, Any], checks: Checks) -> dict[str, Any]:
    top_k = 0 if given["top_k"] is None else given["top_k"]
    infinity = float("inf")
    return {
        "presence_penalty": checks.number("presence_penalty", given["presence_penalty"], -2, 2),
        "frequency_penalty": checks.number("frequency_penalty", given["frequency_penalty"], -2, 2),
        "repetition_penalty": checks.number(
            "repetition_penalty", given["repetition_penalty"], 0, infinity, above_low=True
        ),
        "temperature": checks.number("temperature", given["temperature"], 0, 2),
        "top_p": checks.number("top_p", given["top_p"], 0, 1),
        "top_k": max(checks.integer("top_k", top_k, -1, MAX_TOKENS, "; 0, -1 and None are off"), 0),
        "min_p": checks.number("min_p", given["min_p"], 0, 1),
    }


def _stops(given: Mapping[str, Any], checks: Checks) -> dict[str, Any]:
    ids = () if given["stop_token_ids"] is None else given["stop_token_ids"]
    rule: Any = given["repetition_detection"]
    if isinstance(rule, Mapping):
        try:
            rule = RepetitionDetection(**rule)
        except (TypeError, ValueError) as error:
            checks.fail(
                "repetition_detection", dict(rule), f"max_pattern_size, min_pattern_size, min_count ({error})"
            )
    elif rule is not None and not isinstance(rule, RepetitionDetection):
        checks.fail("repetition_detection", rule, "RepetitionDetection, a mapping of its fields, or None")
    return {
        "stop": checks.strings("stop", given["stop"], MAX_STOP_STRINGS, MAX_STRING_CHARS),
        "stop_token_ids": checks.token_ids("stop_token_ids", ids, 0, MAX_STOP_TOKEN_IDS),
        "ignore_eos": checks.flag("ignore_eos", given["ignore_eos"]),
        "repetition_detection": rule,
    }


def _logprobs(given: Mapping[str, Any], checks: Checks) -> dict[str, Any]:
    named, rows = given["logprob_token_ids"], given["prompt_logprob_token_ids"]
    if named is not None:
        named = checks.token_ids("logprob_token_ids", named, 1, MAX_LOGPROB_TOKEN_IDS)
    if rows is not None:
        field = "prompt_logprob_token_ids"
        rows = tuple(
            checks.token_ids(f"{field}[{i}]", row, 0, MAX_LOGPROB_TOKEN_IDS, low=-1)
            for i, row in enumerate(checks.sized(field, rows, "rows of token ids", 1, MAX_PROMPT_ROWS))
        )
    prompt_logprobs = checks.optional_integer("prompt_logprobs", given["prompt_logprobs"], 0, MAX_LOGPROBS)
    if given["logprobs_mode"] not in ("raw", "processed"):
        checks.fail("logprobs_mode", given["logprobs_mode"], "'raw' or 'processed'")
    return {
        "logprobs": checks.optional_integer("logprobs", given["logprobs"], 0, MAX_LOGPROBS),
        "prompt_logprobs": 0 if prompt_logprobs is None and rows else prompt_logprobs,
        "logprob_token_ids": named,
        "prompt_logprob_token_ids": rows,
        "prompt_logprob_start": checks.optional_integer(
            "prompt_logprob_start", given["prompt_logprob_start"], 0, MAX_TOKENS
        ),
        "logprobs_mode": given["logprobs_mode"],
        "flat_logprobs": checks.flag("flat_logprobs", given["flat_logprobs"]),
    }


def _constraints(given: Mapping[str, Any], checks: Checks) -> dict[str, Any]:
    allowed = given["allowed_token_ids"]
    if allowed is not None:
        allowed = checks.token_ids("allowed_token_ids", allowed, 1, MAX_ALLOWED_TOKEN_IDS)
    skip = given["skip_reading_prefix_cache"]
    if skip is not None:
        checks.flag("skip_reading_prefix_cache", skip)
    elif given["prompt_logprobs"] is not None or given["prompt_logprob_token_ids"] is not None:
        skip = True
    if given["extra_args"] is not None:
        _check_extra_args(given["extra_args"], checks)
    budget = checks.optional_integer("thinking_token_budget", given["thinking_token_budget"], -1, MAX_TOKENS)
    return {
        "logit_bias": None if given["logit_bias"] is None else _logit_bias(given["logit_bias"], checks),
        "allowed_token_ids": allowed,
        "bad_words": checks.strings("bad_words", given["bad_words"], MAX_BAD_WORDS, MAX_STRING_CHARS),
        "extra_args": given["extra_args"],
        "skip_reading_prefix_cache": skip,
        "structured_outputs": read_structured_outputs(given["structured_outputs"], checks),
        "thinking_token_budget": None if budget == -1 else budget,
    }


def _logit_bias(bias: Any, checks: Checks) -> dict[int, float]:
    """Keys may be strings of digits, as in JSON; values are clamped to +-100."""
    allowed = f"at most {MAX_LOGIT_BIAS} token ids with finite numbers"
    if not isinstance(bias, Mapping) or len(bias) > MAX_LOGIT_BIAS:
        shown = f"a mapping of {len(bias)} items" if isinstance(bias, Mapping) else bias
        checks.fail("logit_bias", shown, allowed)
        return {}
    normal: dict[int, float] = {}
    for key, value in bias.items():
        decimal = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        token, number = int(key) if decimal else as_integer(key), as_number(value)
        if token is None or not 0 <= token < 2**31 or number is None or token in normal:
            checks.fail("logit_bias", {key: value}, f"{allowed}, each token once")
            return {}
        normal[token] = min(max(number, -100.0), 100.0)
    return normal


def _output(given: Mapping[str, Any], checks: Checks) -> dict[str, Any]:
    if not isinstance(given["output_kind"], OutputKind):
        checks.fail("output_kind", given["output_kind"], ", ".join(map(str, OutputKind)))
    return {
        **{name: checks.flag(name, given[name]) for name in _TEXT_FLAGS},
        "output_kind": given["output_kind"],
        "stream_interval": checks.optional_integer(
            "stream_interval", given["stream_interval"], 1, MAX_TOKENS
        ),
    }


def _check_contradictions(normal: Mapping[str, Any], checks: Checks) -> None:
    """Combinations that cannot both be meant."""
    max_tokens, min_tokens = normal["max_tokens"], normal["min_tokens"]
    if max_tokens is not None and min_tokens > max_tokens:
        checks.fail("min_tokens", min_tokens, f"at most max_tokens ({max_tokens})")
    if normal["stop"] and not normal["detokenize"]:
        checks.fail("stop", normal["stop"], "none with detokenize=False: stop strings are found in the text")
    start = normal["prompt_logprob_start"]
    if start is not None and normal["prompt_logprob_token_ids"] is None:
        checks.fail("prompt_logprob_start", start, "None without prompt_logprob_token_ids")
    if normal["prompt_logprobs"] is not None and normal["skip_reading_prefix_cache"] is False:
        checks.fail(
            "skip_reading_prefix_cache", False, "True or None with prompt_logprobs: they need all positions"
        )
    allowed = normal["allowed_token_ids"]
    if allowed is not None and min_tokens > 0 and set(allowed) <= set(normal["stop_token_ids"]):
        checks.fail("allowed_token_ids", allowed, "a token that is no stop token, as min_tokens is above 0")


def _check_extra_args(extra: Any, checks: Checks) -> None:
    """JSON-like, of bounded size and depth, with integers that MessagePack can hold."""
    if not isinstance(extra, Mapping):
        checks.fail("extra_args", extra, "a mapping or None")
        return
    pending: list[tuple[Any, int]] = [(extra, 1)]
    seen = 0
    while pending:
        value, depth = pending.pop()
        nested = isinstance(value, Mapping | list | tuple)
        seen += len(value) if nested else 0
        if seen > MAX_EXTRA_ITEMS or depth > MAX_EXTRA_DEPTH:
            checks.fail(
                "extra_args", extra, f"at most {MAX_EXTRA_ITEMS} values, nested {MAX_EXTRA_DEPTH} deep"
            )
            return
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            checks.fail("extra_args", value, "integers from -2**63 to 2**64 - 1")
            return
        if nested:
            children = (*value.keys(), *value.values()) if isinstance(value, Mapping) else value
            pending += [(child, depth + 1) for child in children]
