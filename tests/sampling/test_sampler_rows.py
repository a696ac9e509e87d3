"""A row's result depends on that row alone: not on neighbours, padding, or unhealthy rows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_cases import SLOTS, Row, decode, make_inputs, sample_jit, sample_optimized

from jaxinfer.sampling.state import init_state
from tests.support.variants import variants

VOCAB = 320

MIXED = [
    Row(),
    Row(temperature=1.0, key=(1, 1)),
    Row(temperature=0.8, top_k=5, key=(2, 2)),
    Row(temperature=1.2, top_p=0.9, key=(3, 3), repetition=1.2),
    Row(temperature=1.0, top_k=100, top_p=0.97, key=(4, 4), logprobs=True),
    Row(temperature=1.0, min_p=0.1, key=(5, 5), logprobs=True, processed=True),
    Row(allowed=(3, 4, 5), logprobs=True),
    Row(temperature=1.0, bias=((7, 5.0),), presence=0.5, key=(6, 6)),
]


def one(output, row: int):
    """All that a row got, as a list of arrays."""
    return [np.asarray(leaf)[row] for leaf in jax.tree.leaves(output)]


def assert_same_bits(left, right) -> None:
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("vocab", "buckets"), variants([(VOCAB, (1,)), (VOCAB, (64,)), (6400, (2, 64))], quick=[(VOCAB, (1,))])
)
def test_rows_are_the_same_bits_in_every_bucket(vocab: int, buckets: tuple[int, ...]) -> None:
    """Each row alone in several buckets, against all rows together: same token, same log-probabilities."""
    rng = np.random.default_rng(0)
    logits_PV = (rng.standard_normal((len(MIXED), vocab)) * 3).astype(np.float32)
    rows = [replace(row, logprobs=True) for row in MIXED]
    state = init_state(SLOTS, vocab)
    together, _ = sample_optimized(jnp.asarray(logits_PV), make_inputs(rows, vocab), state)
    for bucket in buckets:
        for r, row in enumerate(rows):
            padded_PV = jnp.zeros((bucket, vocab), jnp.float32).at[0].set(logits_PV[r])
            alone, _ = sample_optimized(padded_PV, make_inputs([row], vocab, bucket), state)
            assert_same_bits(one(alone, 0), one(together, r))


def test_neighbours_that_switch_branches_on_change_nothing() -> None:
    rng = np.random.default_rng(1)
    logits_PV = jnp.asarray((rng.standard_normal((8, VOCAB)) * 2).astype(np.float32))
    plain = [Row(), Row(temperature=1.0, key=(9, 9))]
    before, _ = sample_jit(logits_PV, make_inputs(plain, VOCAB, 8), init_state(SLOTS, VOCAB))
    for neighbour in MIXED:
        after, _ = sample_jit(logits_PV, make_inputs([*plain, neighbour], VOCAB, 8), init_state(SLOTS, VOCAB))
        for r in range(2):
            assert int(before.token_P[r]) == int(after.token_P[r])


def test_smp_04_disabled_top_k_has_no_effect() -> None:
    """All-zero logits, temperature 1.5, seeds 0 to 19; absent, V and neighbours with top-k 1 or greedy."""
    keys = [(seed, 17) for seed in range(20)]

    def run(extra: list[Row], **options) -> list[list[int]]:
        rows = [Row(temperature=1.5, key=key, **options) for key in keys] + extra
        logits_PV = np.zeros((len(rows), VOCAB), np.float32)
        return decode(logits_PV, rows, init_state(SLOTS, VOCAB), 8, 64)[0]

    absent = run([])
    assert len({tuple(tokens) for tokens in absent}) >= 15
    assert run([], top_k=VOCAB) == absent
    with_neighbours = run([Row(temperature=1.5, top_k=1, key=(1, 1)), Row()], top_p=1.0, min_p=0.0)
    assert with_neighbours[:20] == absent
    assert with_neighbours[21] == [0] * 8


@pytest.mark.parametrize("vocab", [VOCAB, 6400])
@pytest.mark.parametrize("place", [0, 5, 130, -1])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_smp_08_non_finite_rows_are_flagged_alone(bad: float, place: int, vocab: int) -> None:
    rng = np.random.default_rng(2)
    logits_PV = rng.standard_normal((8, vocab)).astype(np.float32)
    rows = [replace(row, logprobs=True) for row in MIXED]
    state = init_state(SLOTS, vocab)
    healthy, _ = sample_jit(jnp.asarray(logits_PV), make_inputs(rows, vocab), state)
    assert np.asarray(healthy.healthy_P).all()
    broken_PV = logits_PV.copy()
    broken_PV[[0, 4], place] = bad
    output, _ = sample_jit(jnp.asarray(broken_PV), make_inputs(rows, vocab), state)
    assert np.asarray(output.healthy_P).tolist() == [False, True, True, True, False, True, True, True]
    assert int(output.token_P[0]) == int(output.token_P[4]) == 0
    for r in (1, 2, 3, 5, 6, 7):
        assert_same_bits(one(output, r), one(healthy, r))


def test_smp_08_infinite_masks_are_fine_but_not_everywhere() -> None:
    """-inf entries alone are no error; a row with nothing left is, whether by the model or by its mask."""
    logits_PV = np.full((8, VOCAB), -np.inf, np.float32)
    logits_PV[0, 7] = 1.0
    logits_PV[1, [3, 9]] = 2.0
    logits_PV[3, 7] = 1.0
    rows = [Row(), Row(temperature=1.0, top_p=0.9), Row(), Row(allowed=(8,)), Row(temperature=1.0)]
    output, _ = sample_jit(jnp.asarray(logits_PV), make_inputs(rows, VOCAB, 8), init_state(SLOTS, VOCAB))
    assert np.asarray(output.healthy_P)[:5].tolist() == [True, True, False, False, False]
    assert int(output.token_P[0]) == 7
    assert int(output.token_P[1]) in (3, 9)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits_PV = np.zeros((8, VOCAB), np.float32)
    logits_PV[1, [200, 17, 130]] = 1.0
    logits_PV[2, [319, 318]] = 1.0
    output, _ = sample_jit(
        jnp.asarray(logits_PV), make_inputs([Row()] * 3, VOCAB, 8), init_state(SLOTS, VOCAB)
    )
    assert np.asarray(output.token_P)[:3].tolist() == [0, 17, 318]
