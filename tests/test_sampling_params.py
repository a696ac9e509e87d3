"""SamplingParams: defaults, normal forms, every rule, and limits that cost nothing to check."""

import time
from dataclasses import replace

import numpy as np
import pytest

from jaxinfer.sampling_params import (
    InvalidParamsError,
    OutputKind,
    RepetitionDetection,
    SamplingParams,
    validate_for_model,
)


def problems(**given) -> list[str]:
    with pytest.raises(InvalidParamsError) as error:
        SamplingParams(**given)
    return [problem.field for problem in error.value.problems]


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ((), (), ())
    assert params.output_kind is OutputKind.CUMULATIVE
    assert params.skip_special_tokens
    assert params.detokenize
    assert not params.greedy
    assert not params.penalised
    assert not params.wants_logprobs


def test_normal_forms() -> None:
    params = SamplingParams(
        stop="x", stop_token_ids=[3, 3, np.int64(4)], top_k=None, logit_bias={"5": 250, 6: -1}, temperature=1
    )
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3, 4)
    assert params.top_k == 0
    assert params.logit_bias == {5: 100.0, 6: -1.0}
    assert isinstance(params.temperature, float)
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None).stop == ()
    assert SamplingParams(repetition_detection={"max_pattern_size": 4}).repetition_detection == (
        RepetitionDetection(4, 1, 2)
    )
    assert replace(params, seed=3).logit_bias == params.logit_bias


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1, None])
def test_every_signed_64_bit_seed_is_real(seed: int | None) -> None:
    assert SamplingParams(seed=seed).seed == seed


@pytest.mark.parametrize(
    "given",
    [{"temperature": 0}, {"temperature": 9.9e-6}, {"top_p": 0}, {"top_k": 1}, {"temperature": 0, "n": 4}],
)
def test_greedy_spellings(given: dict) -> None:
    assert SamplingParams(**given).greedy
    assert not SamplingParams(temperature=1e-5).greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 5_000_000),
        ("n", True),
        ("n", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
        ("temperature", -0.1),
        ("temperature", 2.01),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 2.0),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", False),
        ("stop", 3),
        ("stop_token_ids", 3),
        ("ignore_eos", 1),
        ("max_tokens", -1),
        ("max_tokens", 2**63),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", 21),
        ("prompt_logprob_start", -1),
        ("logprobs_mode", "both"),
        ("logprob_token_ids", []),
        ("logprob_token_ids", range(129)),
        ("flat_logprobs", None),
        ("detokenize", 0),
        ("output_kind", 1),
        ("stream_interval", 0),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {1: float("inf")}),
        ("logit_bias", {1: 2, "1": 3}),
        ("allowed_token_ids", []),
        ("bad_words", [3][0]),
        ("repetition_detection", {"max_pattern_size": 0}),
        ("repetition_detection", {"max_pattern_size": 2, "min_pattern_size": 3}),
        ("repetition_detection", {"max_pattern_size": 2, "min_count": 1}),
        ("repetition_detection", {"pattern": 2}),
        ("extra_args", {"a": 2**64}),
        ("extra_args", [1]),
        ("skip_reading_prefix_cache", 1),
    ],
)
def test_a_wrong_value_names_its_field(field: str, value: object) -> None:
    assert problems(**{field: value}) == [field]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a", "b" * 1025]}, "stop[1]"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids[0]"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids[0]"),
        ({"bad_words": ["ok", ""]}, "bad_words[1]"),
        ({"prompt_logprob_token_ids": [[1], [-2]]}, "prompt_logprob_token_ids[1][0]"),
    ],
)
def test_a_wrong_item_names_its_place(given: dict, field: str) -> None:
    assert problems(**given) == [field]


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match="temperature is 9; allowed: a finite number") as error:
        SamplingParams(temperature=9, n=0, stop=[""], top_k=-7)
    assert {p.field for p in error.value.problems} == {"temperature", "n", "stop[0]", "top_k"}
    assert error.value.param == "n"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": "x", "detokenize": False}, "stop"),
        ({"prompt_logprob_start": 3}, "prompt_logprob_start"),
        ({"prompt_logprobs": 1, "skip_reading_prefix_cache": False}, "skip_reading_prefix_cache"),
        ({"allowed_token_ids": [1], "stop_token_ids": [1], "min_tokens": 1}, "allowed_token_ids"),
    ],
)
def test_contradictions_are_errors(given: dict, field: str) -> None:
    assert problems(**given) == [field]


def test_lpb_03_prompt_logprobs_do_not_read_the_prefix_cache() -> None:
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache
    named = SamplingParams(prompt_logprob_token_ids=[[1, -1]], prompt_logprob_start=2)
    assert named.skip_reading_prefix_cache
    assert named.prompt_logprobs == 0
    assert not SamplingParams(logprobs=3).skip_reading_prefix_cache
    assert replace(SamplingParams(), prompt_logprobs=1).skip_reading_prefix_cache


def test_lpb_01_logprobs_limits() -> None:
    """0 asks for the chosen token alone; 20 is the most; anything else is refused before it reaches a device."""
    for count in (0, 1, 5, 20):
        assert SamplingParams(logprobs=count).wants_logprobs
    for count in (21, 1_000_000, -1):
        assert problems(logprobs=count) == ["logprobs"]


@pytest.mark.parametrize(
    "given",
    [
        {"n": 5_000_000},
        {"stop": ["x"] * 500_000},
        {"stop": ["x" * 2**20]},
        {"bad_words": ["x"] * 50_000},
        {"logit_bias": dict.fromkeys(range(100_000), 1.0)},
        {"max_tokens": 2**63},
        {"seed": 10**4000},
        {"allowed_token_ids": range(2**40)},
        {"extra_args": {"a": [0] * 100_000}},
    ],
)
def test_api_03_limits_come_before_work(given: dict) -> None:
    """Each refused quickly, with a short message that names the field."""
    start = time.perf_counter()
    with pytest.raises(InvalidParamsError) as error:
        SamplingParams(**given)
    assert time.perf_counter() - start < 0.05
    assert error.value.param.split("[")[0] in given
    assert len(str(error.value)) < 400


def test_api_03_deep_extra_args_are_refused() -> None:
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert problems(extra_args={"a": deep}) == ["extra_args"]


def test_api_03_ids_must_be_in_the_vocabulary() -> None:
    params = SamplingParams(
        stop_token_ids=[320],
        logit_bias={400: 1},
        allowed_token_ids=[5, 320],
        logprob_token_ids=[319, 320],
        prompt_logprob_token_ids=[[1], [320]],
    )
    with pytest.raises(InvalidParamsError) as error:
        validate_for_model(params, 320)
    assert len(error.value.problems) == 5
    validate_for_model(SamplingParams(stop_token_ids=[319], logit_bias={319: 1}, top_k=500), 320)


def test_model_knowledge_finds_impossible_requests() -> None:
    params = SamplingParams(allowed_token_ids=[257], min_tokens=1)
    validate_for_model(params, 320)
    with pytest.raises(InvalidParamsError, match="end tokens"):
        validate_for_model(params, 320, eos_token_ids=(257, 258))
    validate_for_model(replace(params, ignore_eos=True), 320, eos_token_ids=(257, 258))
    rows = SamplingParams(prompt_logprob_token_ids=[[1]] * 65)
    with pytest.raises(InvalidParamsError, match="65 rows"):
        validate_for_model(rows, 320, max_model_len=64)


def test_max_tokens_zero_and_none_are_allowed() -> None:
    assert SamplingParams(max_tokens=0).max_tokens == 0
    assert SamplingParams(max_tokens=None, min_tokens=50).max_tokens is None
