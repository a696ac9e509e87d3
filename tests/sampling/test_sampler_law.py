"""The sampled law against a float64 oracle with a full sort."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import SLOTS, Row, log_law, make_inputs, sample_jit

from jaxinfer.sampling.law import uniforms
from jaxinfer.sampling.state import init_state

VOCAB = 320
ROWS = 8

rows = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 2, 5, 50, 64, 65, 100, 319, 320]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.95, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    repetition=st.sampled_from([1.0, 0.7, 1.3]),
    presence=st.sampled_from([0.0, -1.0, 1.5]),
    frequency=st.sampled_from([0.0, 0.25]),
    key=st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    position=st.integers(0, 2**31 - 1),
    allowed=st.one_of(st.none(), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=150).map(tuple)),
    bias=st.lists(
        st.tuples(st.integers(0, VOCAB - 1), st.floats(-100, 100)), max_size=4, unique_by=lambda b: b[0]
    ).map(tuple),
    logprobs=st.just(True),
    processed=st.booleans(),
)


def random_state(rng: np.random.Generator):
    state = init_state(SLOTS, VOCAB)
    counts = rng.poisson(0.2, (SLOTS + 1, VOCAB)).astype(np.int32)
    seen = rng.random((SLOTS + 1, VOCAB)) < 0.2
    return type(state)(state.newest_W, jnp.asarray(counts), jnp.asarray(seen)), counts, seen


def assert_row(row, logits_V, counts_V, seen_V, output, uniform, r):
    """Token by the oracle's inverse CDF, up to rounding at its steps; log-probabilities by the oracle's law."""
    log_law_V, edited_V = log_law(logits_V, row, counts_V, seen_V)
    law_V = np.exp(log_law_V)
    token = int(output.token_P[r])
    if row.temperature == 0:
        assert edited_V[token] >= edited_V.max() - 1e-5 * max(1, abs(edited_V.max()))
    else:
        cdf_V = np.cumsum(law_V)
        below, above = cdf_V[token] - law_V[token], cdf_V[token]
        assert law_V[token] > 0
        assert below - 3e-6 <= uniform <= above + 3e-6
    if not row.processed:
        x_V = logits_V.astype(np.float64)
        log_law_V = x_V - x_V.max() - np.log(np.exp(x_V - x_V.max()).sum())
    chosen = float(output.logprobs.chosen_P[r])
    np.testing.assert_allclose(chosen, log_law_V[token], rtol=3e-4, atol=3e-4)
    top = np.asarray(output.logprobs.top_values_PX[r])
    np.testing.assert_allclose(top, np.sort(log_law_V)[::-1][:20], rtol=3e-4, atol=3e-4)


@settings(max_examples=30, deadline=None)
@given(st.lists(rows, min_size=ROWS, max_size=ROWS), st.integers(0, 2**31), st.sampled_from([0.5, 3.0, 10.0]))
def test_law_matches_oracle(batch: list[Row], seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    logits_PV = (rng.standard_normal((ROWS, VOCAB)) * scale).astype(np.float32)
    state, counts, seen = random_state(rng)
    inputs = make_inputs(batch, VOCAB)
    output, _ = sample_jit(jnp.asarray(logits_PV), inputs, state)
    output = jax.tree.map(np.asarray, output)
    uniform_P = np.asarray(uniforms(inputs.key_P2, inputs.position_P))
    assert output.healthy_P.all()
    for r, row in enumerate(batch):
        assert_row(row, logits_PV[r], counts[r], seen[r], output, float(uniform_P[r]), r)


def expected_counts(logits_V: np.ndarray, row: Row, draws: int) -> np.ndarray:
    zeros_V = np.zeros(logits_V.size)
    return np.exp(log_law(logits_V, row, zeros_V, zeros_V > 0)[0]) * draws


def assert_chi_square(counts_V: np.ndarray, expected_V: np.ndarray) -> None:
    """p > 1e-4 by the Wilson-Hilferty approximation; tokens of probability 0 never occur."""
    assert (counts_V[expected_V == 0] == 0).all()
    common_V = expected_V >= 5
    observed = np.append(counts_V[common_V], counts_V[~common_V].sum())
    expected = np.append(expected_V[common_V], max(expected_V[~common_V].sum(), 1e-9))
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = max(len(expected) - 1, 1)
    bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound


@pytest.mark.parametrize(
    "row",
    [
        Row(temperature=1.0),
        Row(temperature=0.7, top_k=7),
        Row(temperature=1.3, top_p=0.8),
        Row(temperature=2.0, min_p=0.05, bias=((3, 2.0),)),
    ],
)
def test_draws_follow_the_law(row: Row) -> None:
    """20480 draws with one key and successive positions, and as many with one position and distinct keys."""
    bucket, vocab = 64, VOCAB
    logits_V = np.full(vocab, -np.inf, np.float32)
    logits_V[::8] = np.random.default_rng(5).standard_normal(vocab // 8) * 2
    logits_PV = jnp.asarray(np.tile(logits_V, (bucket, 1)))
    state = init_state(SLOTS, vocab)
    inputs = make_inputs([replace(row, key=(1, 2), position=9)] * bucket, vocab)
    inputs = replace(inputs, slot_P=jnp.full(bucket, SLOTS, jnp.int32))
    by_position, by_key = [], []
    lane_P = np.arange(bucket)
    for step in range(320):
        positions_P = (step * bucket + lane_P).astype(np.int32)
        keys_P2 = np.stack([lane_P, np.full(bucket, step)], axis=1).astype(np.uint32)
        for tokens, changed in (
            (by_position, replace(inputs, position_P=positions_P)),
            (by_key, replace(inputs, key_P2=keys_P2)),
        ):
            tokens += np.asarray(sample_jit(logits_PV, changed, state)[0].token_P).tolist()
    expected_V = expected_counts(logits_V, row, len(by_key))
    assert_chi_square(np.bincount(by_position, minlength=vocab), expected_V)
    assert_chi_square(np.bincount(by_key, minlength=vocab), expected_V)
    pairs = np.zeros((2, 2))
    likely = np.argsort(-expected_V)[: max(1, (np.cumsum(-np.sort(-expected_V)) < len(by_key) / 2).sum())]
    hit = np.isin(by_position, likely).astype(int)
    np.add.at(pairs, (hit[:-1], hit[1:]), 1)
    shares = pairs.sum(1, keepdims=True) * pairs.sum(0, keepdims=True) / pairs.sum()
    assert ((pairs - shares) ** 2 / shares).sum() < 15.1  # chi-square with 1 degree of freedom, p = 1e-4


def kept_tokens(logits_V: list[float], row: Row) -> list[int]:
    """Tokens of positive probability, read from the processed log-probabilities."""
    row = replace(row, temperature=1.0, logprobs=True, processed=True, named=tuple(range(len(logits_V))))
    padded_V = logits_V + [-np.inf] * (VOCAB - len(logits_V))
    inputs = make_inputs([row], VOCAB, ROWS)
    output, _ = sample_jit(jnp.asarray([padded_V] * ROWS, jnp.float32), inputs, init_state(SLOTS, VOCAB))
    values = np.asarray(output.logprobs.named_values_PX)[0, : len(logits_V)]
    return np.flatnonzero(values > -np.inf).tolist()


def test_ties_at_the_threshold_stay() -> None:
    """Pinned: top-k keeps all tokens tied with the k-th; top-p keeps all tied with the last it needs."""
    logits = [1.0, 3.0, 2.0, 2.0, 2.0, 0.0]
    assert kept_tokens(logits, Row(top_k=2)) == [1, 2, 3, 4]
    assert kept_tokens(logits, Row(top_k=1)) == [1]
    assert kept_tokens([0.0] * 100, Row(top_k=3)) == list(range(100))
    assert kept_tokens(logits, Row(top_p=0.5)) == [1, 2, 3, 4]
    assert kept_tokens(logits, Row(top_p=0.4)) == [1]
    assert kept_tokens([0.0, -0.0, -1.0], Row(top_k=1)) == [0, 1]


def test_top_p_is_taken_of_what_top_k_left() -> None:
    probabilities = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert kept_tokens(probabilities, Row(top_p=0.69)) == [0, 1]
    assert kept_tokens(probabilities, Row(top_k=2, top_p=0.55)) == [0]  # 0.4 of 0.7 is 0.57
    assert kept_tokens(probabilities, Row(min_p=0.5)) == [0, 1, 2]
    assert kept_tokens(probabilities, Row(top_p=1.0, top_k=4)) == [0, 1, 2, 3]


def test_flat_and_wide_distributions_are_searched() -> None:
    """Thresholds beyond the first candidates: bisection, with and without ties."""
    vocab = 6400
    rng = np.random.default_rng(11)
    logits_V = (rng.permutation(vocab) / vocab).astype(np.float32)
    rows = [
        Row(temperature=1.0, top_k=1000, position=1),
        Row(temperature=1.0, top_p=0.5, position=2),
        Row(temperature=0.5, top_k=300, top_p=0.9, min_p=0.5, position=3),
        Row(temperature=1.0, top_k=4999, position=4),
        Row(temperature=1.0, top_p=0.999999, position=5),
        Row(temperature=1.0, top_k=65, position=6),
    ]
    rows = [replace(row, logprobs=True, processed=True) for row in rows]
    inputs = make_inputs(rows, vocab, ROWS)
    state = init_state(SLOTS, vocab)
    output, _ = sample_jit(jnp.asarray(np.tile(logits_V, (ROWS, 1))), inputs, state)
    zeros_V = np.zeros(vocab)
    for r, row in enumerate(rows):
        log_law_V, _ = log_law(logits_V, row, zeros_V, zeros_V > 0)
        top = np.asarray(output.logprobs.top_values_PX[r])
        np.testing.assert_allclose(top, np.sort(log_law_V)[::-1][:20], atol=2e-4)
        assert log_law_V[int(output.token_P[r])] > -np.inf


def test_tiny_temperatures_do_not_overflow() -> None:
    logits_PV = jnp.asarray([[2e38, 1e38, -3e38] + [-np.inf] * (VOCAB - 3)] * ROWS, jnp.float32)
    row = Row(temperature=1e-5, top_k=3, top_p=0.9, logprobs=True, processed=True)
    output, _ = sample_jit(logits_PV, make_inputs([row], VOCAB, ROWS), init_state(SLOTS, VOCAB))
    assert int(output.token_P[0]) == 0
    assert float(output.logprobs.chosen_P[0]) == 0.0
