"""Ragged paged attention in Pallas-Triton, interpreted: the contract, and what only this backend promises."""

from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gpus import Generation
from pallas_kernels.kv_storage import value_dtype
from pallas_kernels.ragged_paged_attention import triton, triton_plan, tuning
from pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention as reference
from pallas_kernels.ragged_paged_attention.tuning import Choice, Facts, Launch
from tests.pallas_kernels.attention_cases import AttentionContract, run
from tests.pallas_kernels.attention_inputs import KV_DTYPES, SHAPES, Shape, inputs, solo

SMALL = Launch(rows=8, slots=32, splits=1, num_warps=4, num_stages=3)
SPLIT = replace(SMALL, splits=4)
FACTS = Facts(T=64, R=64, context=4096, K=8, G=4, h=128, q_dtype="bfloat16", kv_dtype="bfloat16", window=None)
TOKENS, TILE = 150, 4


def interpreted(launch: Launch) -> partial[jax.Array]:
    """The op with one launch shape for rows of any length, as in a mixed batch of small tiles."""
    return partial(triton.ragged_paged_attention, interpret=True, choice=Choice(launch, launch))


OPS = {1: interpreted(SMALL), 4: interpreted(SPLIT)}


class TestAttentionTriton(AttentionContract):
    op = staticmethod(partial(triton.ragged_paged_attention, interpret=True))
    shapes = tuple(shape for shape in SHAPES if value_dtype(shape.kv_dtype) == shape.kv_dtype)
    pool_dtypes = tuple(
        pytest.param(dtype, marks=() if dtype in (jnp.float32, jnp.int8) else pytest.mark.slow)
        for dtype in KV_DTYPES
        if value_dtype(dtype) == dtype
    )


@pytest.mark.parametrize("splits", [1, 4])
def test_mixed_batch_in_small_tiles(splits: int) -> None:
    """Rows of several tiles, tiles of padding, contexts of one to four shares; with sinks, which join one of them."""
    shape = Shape(R=6, T=48, M=280, N=900, sinks=True, kv_dtype=jnp.int8)
    args, options = inputs(shape, ((1, 1100), (20, 1100), (1, 300), (2, 2), (1, 1)))
    want, got = run(reference, shape, args, options), run(OPS[splits], shape, args, options)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("splits", [1, 4])
def test_few_tokens_for_many_rows(splits: int) -> None:
    """No more tokens than rows need not be decodes: here is a row of three drafts and a row without a token."""
    shape = Shape(R=8, T=8, M=280, N=900, window=700)
    args, options = inputs(shape, ((1, 1100), (3, 1001), (0, 9), (1, 5)))
    want, got = run(reference, shape, args, options), run(OPS[splits], shape, args, options)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_more_query_heads_than_rows_of_a_program() -> None:
    shape = Shape(R=3, T=12, K=1, G=20, M=20)
    args, options = inputs(shape, ((1, 70), (9, 77)))
    want, got = run(reference, shape, args, options), run(OPS[1], shape, args, options)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("splits", [1, 4])
def test_rows_do_not_depend_on_neighbours(splits: int) -> None:
    """A row's result is the same bits without its neighbours and in another place of the batch."""
    shape = Shape(R=8, T=64, M=150, N=500)
    args, options = inputs(shape, ((7, 550), (1, 599), (20, 60), (1, 4)))
    op = partial(run, OPS[splits], shape)
    want = op(args, options)
    for row, tokens in ((0, 7), (1, 1)):
        own = want[int(args[4][row]) :][:tokens]
        q, k, v, table, start_Q, context_R = alone = solo(args, row)
        np.testing.assert_array_equal(op(alone, options)[:tokens], own)
        moved = (
            jnp.roll(q, 3, axis=0),
            k,
            v,
            jnp.roll(table, 1, axis=0),
            jnp.concatenate([jnp.zeros(1, jnp.int32), 3 + start_Q[:-1]]),
            jnp.roll(context_R, 1).at[0].set(8),
        )
        np.testing.assert_array_equal(op(moved, options)[3 : 3 + tokens], own)


@jax.jit
def _tiles(start_Q: jax.Array, context_R: jax.Array) -> tuple[triton_plan.Tiles, triton_plan.Tiles]:
    tiles = triton_plan.query_tiles(TOKENS, TILE, start_Q, context_R)
    return tiles, triton_plan.decode_tiles(start_Q, context_R)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_tiles_cover_every_token_once(lengths: list[int]) -> None:
    """Tiles of rows with two tokens or more and of padding, and decodes: each token is computed by one program."""
    start_Q = np.cumsum([0, *lengths, *[0] * (6 - len(lengths))]).astype(np.int32)
    times_T = np.zeros(TOKENS, int)
    for tiles, limit in zip(_tiles(start_Q, start_Q[1:] - start_Q[:-1] + 5), (TILE, 1), strict=True):
        for token, count, row in zip(*(np.asarray(x) for x in tiles[:3]), strict=True):
            assert 0 <= count <= limit
            times_T[token : token + count] += 1
            if count and token < start_Q[-1]:
                assert start_Q[row] <= token
                assert token + count <= start_Q[row + 1]
    assert (times_T == 1).all()


def test_refusals_name_the_reason() -> None:
    shape = Shape(R=1, T=1)
    (q, k, v, *rest), _ = inputs(shape, ((1, 1),))

    def supports(q: Any, k: Any, v: Any, generation: Generation = "hopper") -> tuple[bool, str]:
        return triton.supports(q, k, v, *rest, scale=1.0, generation=generation)

    def pool(dtype: jnp.dtype, blocks: int = 9, h: int = 8) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((blocks, 2, 4, h), dtype)

    assert supports(q, k, v) == (True, "")
    assert supports(q, pool(jnp.float8_e4m3fn), pool(jnp.float8_e4m3fn), "ada") == (True, "")
    blocks = (1 << 31) // 64 + 1
    wide = jax.ShapeDtypeStruct((1, 6, 512), jnp.float32)
    for arguments, word in (
        ((q, pool(jnp.uint8), pool(jnp.uint8)), "uint8"),
        ((q, pool(jnp.uint16), pool(jnp.uint16)), "uint16"),
        ((q, pool(jnp.bfloat16), v), "bfloat16"),
        ((q.astype(jnp.int32), k, v), "int32"),
        ((q[:, :5], k, v), "5 query heads"),
        ((wide, pool(jnp.float32, h=512), pool(jnp.float32, h=512)), "512"),
        ((q, pool(jnp.float8_e4m3fn), pool(jnp.float8_e4m3fn), "ampere"), "ampere"),
        ((q, pool(jnp.int8, blocks), pool(jnp.int8, blocks)), "32-bit offsets"),
    ):
        ok, reason = supports(*arguments)
        assert not ok
        assert word in reason


def test_rule_splits_long_contexts_of_few_rows() -> None:
    def splits(**changes: Any) -> int:
        return tuning.choose("hopper", replace(FACTS, **changes)).decode.splits

    assert splits(T=256, R=256) == 1
    assert splits(T=1, R=1, context=32768) == 64
    assert splits(T=1, R=1, context=512) == 1
    assert splits(T=1, R=1, context=32768, window=1024) == 2


def test_choices_are_entries_of_the_table() -> None:
    found = tuning.candidates("hopper", FACTS)
    assert tuning.choose("hopper", FACTS) in found
    assert len(set(found)) == len(found)
    for choice in found:
        assert tuning.from_entry(asdict(choice)) == choice
    assert tuning.key(FACTS) == tuning.key(replace(FACTS, T=60, context=4000))
    assert tuning.key(FACTS) != tuning.key(replace(FACTS, window=1024))
