"""Quantized and 16-bit KV caches through the whole engine (case LOD-07)."""

from dataclasses import replace

import numpy as np
import pytest

from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from tests.support.engines import Job, ids, run
from tests.support.tiny_models import TinyModel, prompt_ids, tiny_model
from tests.support.variants import variants

pytestmark = pytest.mark.kernels

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True, detokenize=False)
PROMPT = prompt_ids(18, seed=5)


def _scaled_model(k_factor: float, v_factor: float) -> TinyModel:
    """The same function with K times ``k_factor`` (undone in Q) and V times ``v_factor`` (undone behind it)."""
    model = tiny_model()
    H, K, h = 8, 2, 8
    params = dict(model.params)
    for layer in range(2):
        qkv = np.array(params[f"layers.{layer}.attention.qkv.weight"])
        qkv[: H * h] /= k_factor
        qkv[H * h : (H + K) * h] *= k_factor
        qkv[(H + K) * h :] *= v_factor
        params[f"layers.{layer}.attention.qkv.weight"] = qkv
        params[f"layers.{layer}.attention.output.weight"] = (
            params[f"layers.{layer}.attention.output.weight"] / v_factor
        )
    return replace(model, params=params, _programs={})


def _run(
    model: TinyModel, cache_dtype: str, k_scale: float = 1.0, v_scale: float = 1.0
) -> list[RequestOutput]:
    """The same prompt twice, so that the second run reads the blocks of the first."""
    scales = {layer: (np.float32([k_scale]), np.float32([v_scale])) for layer in range(2)}
    engine = model.engine(cache_dtype=cache_dtype, scales=scales)
    return [run(engine, [Job(ids(PROMPT), GREEDY)])[0] for _ in range(2)]


def _logprobs(output: RequestOutput) -> np.ndarray:
    entries = output.outputs[0].logprobs
    assert isinstance(entries, list)
    return np.array([entry[token].logprob for token, entry in zip(output.outputs[0].token_ids, entries)])


def _first_error(output: RequestOutput, reference: RequestOutput) -> float:
    """Error of the first token's log-probability: before it no other token can have been chosen."""
    return float(abs(_logprobs(output)[0] - _logprobs(reference)[0]))


@pytest.mark.feature("quantized KV cache", "prefix cache", "logprobs")
@pytest.mark.parametrize(
    "cache_dtype",
    variants(["bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8"], quick=["bfloat16", "fp8_e4m3", "int8"]),
)
def test_lod_07_a_cache_hit_reads_exactly_what_was_written(cache_dtype):
    """With int8 the scales cover the range of K and V, as a calibrated checkpoint's do."""
    scale = 0.05 if cache_dtype == "int8" else 1.0
    first, second = _run(tiny_model(), cache_dtype, scale, scale)
    assert second.num_cached_tokens > 0
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert np.isfinite(_logprobs(first)).all()
    # The prompt's last chunk differs in length, so sums are formed in another order; the cached bits are the same.
    np.testing.assert_allclose(
        _logprobs(second), _logprobs(first), atol=2e-5 if cache_dtype[:3] != "int" else 2e-3
    )


@pytest.mark.feature("quantized KV cache")
@pytest.mark.parametrize("cache_dtype", variants(["fp8_e4m3", "int8"], quick=["int8"]))
def test_lod_07_right_scales_are_closer_to_float32_than_none(cache_dtype):
    """K around 900 saturates at 448 (fp8) and 127 (int8) without a scale, and V around 0.01 vanishes in int8."""
    model = _scaled_model(k_factor=400.0, v_factor=0.01)
    reference = _run(model, "float32")[0]
    largest = 448.0 if cache_dtype == "fp8_e4m3" else 127.0
    scaled = _run(model, cache_dtype, 400.0 * 8 / largest, 0.01 * 8 / largest)[0]
    plain = _run(model, cache_dtype)[0]
    assert np.isfinite(_logprobs(plain)).all(), "values beyond the range saturate"
    assert _first_error(scaled, reference) < _first_error(plain, reference)
    assert _first_error(scaled, reference) < 0.25
