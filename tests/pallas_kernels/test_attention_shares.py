"""Attention over a context whose slots several devices hold."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_storage import value_dtype
from pallas_kernels.mla_attention import reference as mla_reference
from pallas_kernels.mla_attention import xla as mla_xla
from pallas_kernels.ragged_paged_attention import reference, triton, xla
from pallas_kernels.ragged_paged_attention.shares import Share, merge
from pallas_kernels.ragged_paged_attention.tuning import Choice, Launch
from tests.pallas_kernels import mla_attention_cases as mla
from tests.pallas_kernels.attention_cases import AttentionContract, run
from tests.pallas_kernels.attention_inputs import (
    KV_DTYPES,
    SHAPES,
    Rows,
    S,
    Shape,
    any_shape,
    batches,
    inputs,
)
from tests.pallas_kernels.attention_shares import OverShares
from tests.pallas_kernels.picking import SLOW_EXAMPLES
from tests.support.compiling import UNOPTIMIZED

WITHOUT_SINKS = tuple(shape for shape in SHAPES if not shape.sinks)
"""No model here has sinks; they would have to join one share only."""
QUICK = (
    (Shape(R=6, T=64, tree_words=2), 2),
    (Shape(R=6, T=64, tree_words=1, window=S + 30, kv_dtype=jnp.float16, soft_cap=2.0), 4),
    (Shape(R=6, T=6, kv_dtype=jnp.int8, window=5), 2),
)
"""Grouped queries all of them; local blocks of two slots, and of one."""
MERGE = jax.jit(merge, compiler_options=UNOPTIMIZED)


@pytest.mark.slow
class TestXlaOverTwoShares(AttentionContract):
    op = staticmethod(OverShares(xla.ragged_paged_attention_share, 2))
    shapes = WITHOUT_SINKS

    def test_any_shape(self) -> None:
        dtypes = tuple({jnp.dtype(shape.kv_dtype): shape.kv_dtype for shape in self.shapes}.values())

        @settings(max_examples=SLOW_EXAMPLES, deadline=None)
        @given(shape=any_shape(dtypes), data=st.data(), seed=st.integers(0, 99))
        def check(shape: Shape, data: st.DataObject, seed: int) -> None:
            shape = replace(shape, sinks=False)
            args, options = inputs(shape, data.draw(batches(shape)), seed=seed)
            want = run(reference.ragged_paged_attention, shape, args, options)
            np.testing.assert_allclose(self.run(shape, args, options), want, rtol=2e-5, atol=2e-5)

        check()

    def test_no_rows(self) -> None:
        args, options = inputs(WITHOUT_SINKS[0], ())
        assert (self.run(WITHOUT_SINKS[0], args, options) == 0).all()


@pytest.mark.slow
class TestXlaOverFourShares(TestXlaOverTwoShares):
    op = staticmethod(OverShares(xla.ragged_paged_attention_share, 4))
    pool_dtypes = KV_DTYPES[:1]


@pytest.mark.slow
class TestTritonOverTwoShares(TestXlaOverTwoShares):
    op = staticmethod(OverShares(partial(triton.ragged_paged_attention_share, interpret=True), 2))
    shapes = tuple(shape for shape in WITHOUT_SINKS if value_dtype(shape.kv_dtype) == shape.kv_dtype)
    pool_dtypes = (jnp.float32, jnp.int8)


@pytest.mark.slow
class TestLatentXlaOverTwoShares(mla.MlaAttentionContract):
    op = staticmethod(OverShares(mla_xla.mla_attention_share, 2, num_queries=2))


@pytest.mark.feature("context parallel")
@pytest.mark.parametrize(("shape", "count"), QUICK, ids=str)
def test_shares_together_are_the_whole(shape: Shape, count: int) -> None:
    op = OverShares(xla.ragged_paged_attention_share, count)

    @settings(max_examples=12, deadline=None)
    @given(rows=batches(shape), seed=st.integers(0, 99))
    def check(rows: Rows, seed: int) -> None:
        args, options = inputs(shape, rows, seed=seed)
        want = run(reference.ragged_paged_attention, shape, args, options)
        np.testing.assert_allclose(run(op, shape, args, options), want, rtol=2e-5, atol=2e-5)

    check()


@pytest.mark.feature("context parallel")
@pytest.mark.parametrize("splits", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_triton_shares_in_small_tiles(splits: int) -> None:
    """Trees and chunks in several tiles, decodes with contexts of one to four splits, and a window."""
    launch = Launch(rows=8, slots=32, splits=splits, num_warps=4, num_stages=3)
    kernel = partial(triton.ragged_paged_attention_share, interpret=True, choice=Choice(launch, launch))
    shape = Shape(R=6, T=24, M=280, N=900, window=900, tree_words=1)
    args, options = inputs(shape, ((1, 1100), (12, 1100), (5, 21), (1, 300), (1, 1)))
    want, got = (
        run(op, shape, args, options) for op in (reference.ragged_paged_attention, OverShares(kernel, 2))
    )
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_a_share_has_what_the_reference_says() -> None:
    """Devices 0 and 1 of two: decodes and chunks, of which the second device has nothing of contexts up to two."""
    shape = Shape(R=6, T=16)
    kernels = (
        reference.ragged_paged_attention_share,
        xla.ragged_paged_attention_share,
        partial(triton.ragged_paged_attention_share, interpret=True),
    )
    args, _ = inputs(shape, ((1, 1), (2, 2), (1, 3), (4, 19), (1, 40)))
    jitted = [jax.jit(_one_of_two(kernel), compiler_options=UNOPTIMIZED) for kernel in kernels]
    for index in (0, 1):
        own = OverShares(kernels[0], 2).arguments(args, index)
        (want, want_lse), *others = (op(np.int32(index), *own) for op in jitted)
        for out, lse in others:
            np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(lse[:9], want_lse[:9], rtol=2e-5, atol=2e-5)
            assert np.isneginf(lse[:3]).all() == (index == 1)
            assert np.isfinite(lse[3:9]).all()


def _one_of_two(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return lambda index, *args: kernel(*args, share=Share(index, 2), scale=0.4)


def test_reference_shares_of_latents_are_the_whole() -> None:
    shape = mla.Shape(M=12, N=60)
    args, options = mla.inputs(shape, ((1, 40), (5, 21), (1, 2)))
    want = mla.run(mla_reference.mla_attention, args, options)
    for op in (mla_reference, mla_xla):
        shared = OverShares(op.mla_attention_share, 2, num_queries=2)
        np.testing.assert_allclose(mla.run(shared, args, options), want, rtol=3e-5, atol=3e-5)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), count=st.integers(1, 5), seed=st.integers(0, 99))
def test_merge_is_attention_over_everything(data: st.DataObject, count: int, seed: int) -> None:
    """Any cut of the keys, shares without keys, queries without any key, and scores of any size."""
    rng = np.random.default_rng(seed)
    T, H, h, C = 3, 2, 4, 12
    score_THC = rng.normal(size=(T, H, C)) * data.draw(st.sampled_from([1.0, 1e3]))
    value_Ch = rng.normal(size=(C, h))
    share_C = np.array([data.draw(st.integers(0, count - 1)) for _ in range(C)])
    score_THC[0] = -np.inf
    outs, sums = [], []
    for index in range(count):
        mine_THC = np.where(share_C == index, score_THC, -np.inf)
        outs.append(np.full((T, H, h), np.nan) if index not in share_C else _attend(mine_THC, value_Ch))
        sums.append(np.logaddexp.reduce(mine_THC, axis=-1))
    got = MERGE(jnp.asarray(np.array(outs), jnp.float32), jnp.asarray(np.array(sums), jnp.float32))
    np.testing.assert_allclose(got, _attend(score_THC, value_Ch), rtol=1e-3, atol=1e-3)
    assert (np.asarray(got)[0] == 0).all()


def _attend(score_THC: np.ndarray, value_Ch: np.ndarray) -> np.ndarray:
    top = score_THC.max(-1, keepdims=True)
    p_THC = np.exp(score_THC - np.where(np.isneginf(top), 0.0, top))
    total = p_THC.sum(-1, keepdims=True)
    return p_THC / np.where(total == 0, 1.0, total) @ value_Ch


@settings(deadline=None)
@given(count=st.integers(1, 5), block_size=st.integers(1, 4), length=st.integers(0, 60))
def test_slots_are_counted_and_found(count: int, block_size: int, length: int) -> None:
    """Every position is one slot of one device; a device has as many slots before a position as it says."""
    everywhere = []
    for index in range(count):
        share = Share(index, count)
        position = np.asarray(share.positions(np.arange(60 * block_size), block_size))
        everywhere += position.tolist()
        assert (position < length).sum() == share.slots_before(np.int32(length), block_size)
        own = np.asarray(share.own_slots(position, block_size))
        np.testing.assert_array_equal(own, np.arange(60 * block_size))
        foreign = np.setdiff1d(np.arange(60 * block_size), position)
        assert (np.asarray(share.own_slots(foreign, block_size)) == 0).all()
    assert sorted(everywhere) == list(range(60 * block_size * count))
