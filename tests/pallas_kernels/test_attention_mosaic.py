"""Ragged paged attention on Mosaic GPU, interpreted with the detection of races; and its list of tiles."""

import os
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention import mosaic
from pallas_kernels.ragged_paged_attention.mosaic_tiles import (
    FIELDS,
    TILE_UNITS,
    UNIT_TOKENS,
    tile_bound,
    tile_list,
)
from pallas_kernels.ragged_paged_attention.mosaic_tuning import Choice
from pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention as reference
from tests.pallas_kernels.picking import Picks, picked_shapes

Rows = tuple[tuple[int, int], ...]
if jax.__version_info__ >= mosaic.OLDEST_JAX:
    # Threads of XLA on the CPU, read when its client starts. The interpreter runs the three warpgroups of a kernel in
    # threads that wait for each other, within the program's own: on two cores the usual pool is too small and hangs.
    os.environ.setdefault("NPROC", "8")
interpreted = pytest.mark.skipif(
    jax.__version_info__ < mosaic.OLDEST_JAX,
    reason=f"jax {jax.__version__} has no interpreter for Mosaic GPU kernels; 0.11 has",
)


@dataclass(frozen=True)
class Shape:
    """What a compiled call depends on."""

    R: int = 5
    T: int = 48
    M: int = 12
    N: int = 40
    K: int = 1
    G: int = 4
    h: int = 64
    S: int = 16
    slots: int = 64
    dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None


PLAIN = Shape()
CAPPED = Shape(G=7, S=8, M=20, N=48, dtype="float16", window=20, soft_cap=3.0)
WIDE = Shape(R=2, T=24, M=5, N=12, K=2, G=2, h=128, S=32, slots=128)
LARGE_PAGES = Shape(R=2, T=24, M=2, N=5, G=1, S=128, window=70)
BATCHES: tuple[tuple[Shape, Rows], ...] = (
    # A row of whole tiles, rows that share groups of 8 tokens, rows of one token, a row without.
    (PLAIN, ((33, 150), (1, 65), (3, 17), (0, 9), (6, 6))),
    # Whole groups of tokens only; a context that ends with a page, one that ends with a step.
    (PLAIN, ((16, 48), (16, 64), (1, 16))),
    (PLAIN, ((48, 129),)),
    (PLAIN, ()),
    (CAPPED, ((19, 19), (1, 100), (2, 41), (12, 140))),
    (WIDE, ((5, 160), (13, 13))),
    (LARGE_PAGES, ((9, 200), (15, 129))),
)


def inputs(shape: Shape, rows: Rows, seed: int = 0) -> tuple[jax.Array, ...]:
    """Arguments of the op. Slots that no sequence owns hold NaN, table entries past the contexts anything."""
    rng = np.random.default_rng(seed)
    dtype, S = jnp.dtype(shape.dtype), shape.S
    ids = rng.permutation(np.arange(1, shape.N))
    table_RM = rng.choice([0, -1, 7, shape.N, 2**31 - 1, -(2**31)], size=(shape.R, shape.M))
    owned_NS = np.zeros((shape.N, S), bool)
    for row, (tokens, context) in enumerate(rows):
        count = -(-context // S)
        table_RM[row, :count], ids = ids[:count], ids[count:]
        # Blocks that left the window of the row's first token are somebody else's by now.
        first = 0 if shape.window is None else max(0, context - tokens - shape.window + 1)
        for slot in range(first // S * S, context):
            owned_NS[table_RM[row, slot // S], slot % S] = True
    padded = np.array([*rows, *[(0, 0)] * (shape.R - len(rows))]).reshape(-1, 2)
    start_Q = np.concatenate([[0], np.cumsum(padded[:, 0])])
    pools = [
        jnp.asarray(
            np.where(owned_NS[:, None, :, None], rng.normal(size=(shape.N, shape.K, S, shape.h)), np.nan),
            dtype,
        )
        for _ in range(2)
    ]
    q_THh = jnp.asarray(rng.normal(size=(shape.T, shape.K * shape.G, shape.h)), dtype)
    return q_THh, *pools, *(jnp.asarray(x.astype(np.int32)) for x in (table_RM, start_Q, padded[:, 1]))


@lru_cache(maxsize=8)
def _jitted(shape: Shape) -> jax.stages.Wrapped:
    op = partial(mosaic.ragged_paged_attention, choice=Choice(shape.slots, 2), interpret=True)
    return jax.jit(partial(op, scale=shape.h**-0.5, window=shape.window, soft_cap=shape.soft_cap))


def attend(shape: Shape, args: tuple[jax.Array, ...]) -> np.ndarray:
    """The op, interpreted; fails if it has a race."""
    from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races

    out = np.asarray(_jitted(shape)(*args).astype(jnp.float32))
    assert not get_races().races_found
    return out


def expected(shape: Shape, args: tuple[jax.Array, ...]) -> np.ndarray:
    static: dict[str, Any] = {"scale": shape.h**-0.5, "window": shape.window, "soft_cap": shape.soft_cap}
    return np.asarray(reference(*args, **static).astype(jnp.float32))


@interpreted
@pytest.mark.parametrize(("shape", "rows"), BATCHES)
def test_parity(shape: Shape, rows: Rows) -> None:
    """Foreign NaN reaches nothing, padding is 0, and the rest is the reference's."""
    args = inputs(shape, rows)
    got, want = attend(shape, args), expected(shape, args)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2)
    assert (got[sum(tokens for tokens, _ in rows) :] == 0).all()


@st.composite
def any_shape(draw: st.DrawFn) -> Shape:
    """A shape that the op serves: each head width, block size and dtype, tokens and widths that fill no tile."""
    S, R = draw(st.sampled_from([8, 16, 32, 64, 128])), draw(st.integers(1, 5))
    M = draw(st.integers(1, max(1, 256 // S)))
    return Shape(
        R=R,
        T=draw(st.integers(1, 60)),
        M=M,
        N=R * M + 1 + draw(st.integers(0, 3)),
        K=draw(st.integers(1, 2)),
        G=draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16])),
        h=draw(st.sampled_from(mosaic.HEAD_WIDTHS)),
        S=S,
        slots=draw(st.sampled_from([64, 128])),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        window=draw(st.none() | st.integers(1, 200)),
        soft_cap=draw(st.sampled_from([None, 2.0])),
    )


@st.composite
def batches(draw: st.DrawFn, shape: Shape) -> Rows:
    """Any mix of rows that the tokens, the table and the pool have room for."""
    rows: list[tuple[int, int]] = []
    tokens, blocks = shape.T, shape.N - 1
    for _ in range(draw(st.integers(0, shape.R))):
        room = min(blocks, shape.M) * shape.S
        if not room:
            break
        context = draw(st.integers(1, room) | st.just(room))
        count = min(context, tokens, draw(st.sampled_from([0, 1, 2, 7, 8, 9, 17, 60])))
        tokens, blocks = tokens - count, blocks - -(-context // shape.S)
        rows.append((count, context))
    return tuple(rows)


@interpreted
@pytest.mark.timeout(1800)
@picked_shapes
def test_picked_shapes(picks: Picks) -> None:
    """Heads, widths, lengths and block tables as they come; blocks of the pool are in random order."""
    few = (PLAIN, CAPPED, LARGE_PAGES)

    @replace(picks, per_shape=2, most_free=5).settings(few)
    @given(data=st.data(), shape=picks.shapes(few, any_shape()), seed=st.integers(0, 99))
    def check(data: st.DataObject, shape: Shape, seed: int) -> None:
        rows = data.draw(batches(shape))
        args = inputs(shape, rows, seed)
        got, want = attend(shape, args), expected(shape, args)
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2)
        assert (got[sum(tokens for tokens, _ in rows) :] == 0).all()

    check()


@interpreted
def test_result_does_not_depend_on_the_batch() -> None:
    """The same row at another place among the groups of 8 tokens, after and before others: the same bits."""
    row, other = (11, 70), (4, 90)
    alone = inputs(PLAIN, (row,))
    q_THh, k, v, table_RM, _, _ = inputs(PLAIN, (row, other))
    q_THh = q_THh.at[4:15].set(alone[0][:11])
    # The other row's blocks are those of the first row's permutation that follow, so that pools can be shared.
    merged = [
        jnp.where(jnp.isnan(mine), theirs, mine) for mine, theirs in zip(alone[1:3], (k, v), strict=True)
    ]
    table_RM = jnp.stack([table_RM[1], table_RM[0], *table_RM[2:]])
    start_Q = jnp.asarray([0, 4, 15, 15, 15, 15], jnp.int32)
    context_R = jnp.asarray([90, 70, 0, 0, 0], jnp.int32)
    got = attend(PLAIN, (q_THh, *merged, table_RM, start_Q, context_R))
    np.testing.assert_array_equal(got[4:15], attend(PLAIN, alone)[:11])


TILE_ROWS = 6
tiles_of = jax.jit(tile_list, static_argnums=(2, 3, 4))


@st.composite
def lengths(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Tokens of the batch, and of its rows."""
    T = draw(st.sampled_from([8, 200]))
    rows: list[int] = []
    for _ in range(TILE_ROWS):
        rows.append(min(draw(st.sampled_from([0, 1, 1, 2, 7, 8, 9, 40, 130])), T - sum(rows)))
    return T, rows


@settings(max_examples=40, deadline=None)
@given(batch=lengths(), G=st.sampled_from([1, 3, 4, 16]))
def test_tiles_cover_each_token_and_head_once(batch: tuple[int, list[int]], G: int) -> None:
    T, rows = batch
    start_Q = np.concatenate([[0], np.cumsum(rows)])
    context_R = np.array(rows, np.int32) + 5
    tiles = np.asarray(tiles_of(start_Q.astype(np.int32), context_R, T, G, None))
    assert tiles.shape == (tile_bound(T, TILE_ROWS, G), FIELDS)
    covered = np.zeros((T, G), int)
    for row, group, unit, start, end, shift, context, _ in tiles:
        for i in range(unit, unit + TILE_UNITS) if end > start else ():
            token = (group + i // G) * UNIT_TOKENS
            for t in range(max(token, start), min(token + UNIT_TOKENS, end)):
                covered[t, i % G] += 1
                if context:
                    assert t + shift == context - start_Q[row + 1] + t
    owner_T = np.searchsorted(start_Q[1:], np.arange(T), side="right")
    single_T = np.array([row < len(rows) and rows[row] == 1 for row in owner_T], bool)
    np.testing.assert_array_equal(covered, np.broadcast_to(np.where(single_T, 0, 1)[:, None], covered.shape))


def _reason(shape: Shape, **options: Any) -> str:
    pool = jax.ShapeDtypeStruct((shape.N, shape.K, shape.S, shape.h), shape.dtype)
    q_THh = jax.ShapeDtypeStruct((shape.T, shape.K * shape.G, shape.h), shape.dtype)
    integers = (
        jax.ShapeDtypeStruct(size, jnp.int32) for size in ((shape.R, shape.M), (shape.R + 1,), (shape.R,))
    )
    args: tuple[Any, ...] = (q_THh, pool, pool, *integers)
    ok, reason = mosaic.supports(*args, **{"scale": 0.1, **options})
    assert ok == (reason == "")
    return reason


@interpreted
def test_supports_says_what_it_does_not_serve() -> None:
    vector = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert _reason(PLAIN) == _reason(CAPPED) == _reason(WIDE) == _reason(LARGE_PAGES) == ""
    assert "ampere" in _reason(PLAIN, generation="ampere")
    assert "tree" in _reason(PLAIN, ancestors_TU=jax.ShapeDtypeStruct((48, 1), jnp.int32))
    assert "sinks" in _reason(PLAIN, sinks_H=vector)
    assert "scales" in _reason(PLAIN, k_scale_K=vector)
    assert "float32" in _reason(replace(PLAIN, dtype="float32"))
    assert "int8" in _reason(replace(PLAIN, dtype="int8"))
    assert "head width 256" in _reason(replace(PLAIN, h=256))
    assert "blocks of 4 slots" in _reason(replace(PLAIN, S=4))
    assert "scale -1" in _reason(PLAIN, scale=-1)


def test_supports_needs_a_jax_with_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert "needs 0.11" in _reason(PLAIN)
