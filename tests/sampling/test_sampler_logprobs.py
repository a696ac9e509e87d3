"""Log-probabilities: raw and processed, ranks, most likely and named tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_cases import SLOTS, Row, make_inputs, sample_jit

from jaxinfer.sampling.limits import MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS
from jaxinfer.sampling.logprobs import score
from jaxinfer.sampling.state import init_state

score_jit = jax.jit(score)


def log_softmax(x_PV: np.ndarray) -> np.ndarray:
    x_PV = x_PV.astype(np.float64)
    x_PV = x_PV - x_PV.max(-1, keepdims=True)
    return x_PV - np.log(np.exp(x_PV).sum(-1, keepdims=True))


@pytest.mark.parametrize("vocab", [21, 320, 1000, 6400])
def test_score_is_a_log_softmax(vocab: int) -> None:
    """Sizes that are and are not multiples of the group; ties are listed by id."""
    rng = np.random.default_rng(vocab)
    logits_PV = np.round(rng.standard_normal((6, vocab)) * 8, 1).astype(np.float32)  # rounding makes ties
    logits_PV[0, 3] = -np.inf
    target_P = rng.integers(0, vocab, 6).astype(np.int32)
    target_P[0] = 3
    named_PX = rng.integers(0, vocab, (6, MAX_LOGPROB_TOKEN_IDS)).astype(np.int32)
    outputs = jax.tree.map(np.asarray, score_jit(logits_PV, target_P, named_PX))
    expected_PV = log_softmax(logits_PV)
    rows = np.arange(6)
    order_PV = np.argsort(-expected_PV, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_allclose(outputs.chosen_P, expected_PV[rows, target_P], atol=2e-5)
    np.testing.assert_allclose(
        outputs.named_values_PX, np.take_along_axis(expected_PV, named_PX, 1), atol=2e-5
    )
    assert outputs.top_ids_PX.tolist() == order_PV.tolist()
    np.testing.assert_allclose(outputs.top_values_PX, np.take_along_axis(expected_PV, order_PV, 1), atol=2e-5)
    above_P = (logits_PV > logits_PV[rows, target_P][:, None]).sum(-1)
    assert outputs.rank_P.tolist() == (1 + above_P).tolist()


def test_score_of_unhealthy_rows_is_nan_and_alone() -> None:
    logits_PV = np.random.default_rng(0).standard_normal((4, 320)).astype(np.float32)
    target_P, named_PX = np.zeros(4, np.int32), np.zeros((4, MAX_LOGPROB_TOKEN_IDS), np.int32)
    before = score_jit(logits_PV, target_P, named_PX)
    logits_PV[1, 200], logits_PV[2, 5] = np.nan, np.inf
    after = score_jit(logits_PV, target_P, named_PX)
    assert np.isnan(np.asarray(after.chosen_P)).tolist() == [False, True, True, False]
    np.testing.assert_array_equal(np.asarray(after.chosen_P)[[0, 3]], np.asarray(before.chosen_P)[[0, 3]])


def test_score_takes_half_precision() -> None:
    logits_PV = jnp.asarray(np.random.default_rng(0).standard_normal((2, 320)), jnp.bfloat16)
    outputs = score_jit(logits_PV, np.zeros(2, np.int32), np.zeros((2, MAX_LOGPROB_TOKEN_IDS), np.int32))
    expected_PV = log_softmax(np.asarray(logits_PV.astype(jnp.float32)))
    np.testing.assert_allclose(np.asarray(outputs.chosen_P), expected_PV[:, 0], atol=2e-5)


def test_raw_and_processed_rows_side_by_side() -> None:
    """Raw ignores every edit; processed gives -inf to what could not be sampled, and 0 to a sole survivor."""
    logits_PV = np.random.default_rng(3).standard_normal((8, 320)).astype(np.float32)
    rows = [
        Row(temperature=0.5, allowed=(1, 2, 3), logprobs=True, named=(1, 9)),
        Row(temperature=0.5, allowed=(1, 2, 3), logprobs=True, processed=True, named=(1, 9)),
        Row(allowed=(4,), logprobs=True, processed=True, named=(4, 9)),
        Row(temperature=1.0, bias=((8, 100.0),), logprobs=True, named=(8,)),
    ]
    output, _ = sample_jit(jnp.asarray(logits_PV), make_inputs(rows, 320, 8), init_state(SLOTS, 320))
    named = np.asarray(output.logprobs.named_values_PX)
    raw_PV = log_softmax(logits_PV)
    np.testing.assert_allclose(named[0, :2], raw_PV[0, [1, 9]], atol=2e-5)
    np.testing.assert_allclose(named[1, 0], log_softmax(logits_PV[1:2, 1:4] / 0.5)[0, 0], atol=2e-5)
    assert named[1, 1] == -np.inf
    assert named[2, :2].tolist() == [0.0, -np.inf]
    np.testing.assert_allclose(named[3, 0], raw_PV[3, 8], atol=2e-5)
    chosen = np.asarray(output.logprobs.chosen_P)
    np.testing.assert_allclose(chosen[0], raw_PV[0, int(output.token_P[0])], atol=2e-5)


def test_no_logprobs_means_zeros() -> None:
    output, _ = sample_jit(
        jnp.ones((8, 320)), make_inputs([Row(temperature=1.0)] * 8, 320), init_state(SLOTS, 320)
    )
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(output.logprobs))
