"""The contract of ragged paged attention: every backend's test class inherits ``AttentionContract``."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_storage import as_stored, value_dtype
from pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention as reference

S = 4
Attention = Callable[..., jax.Array]
Rows = tuple[tuple[int, int], ...]
KV_DTYPES = (
    jnp.float32,
    jnp.float16,
    jnp.bfloat16,
    jnp.int8,
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.uint16,
    jnp.uint8,
)


@dataclass(frozen=True)
class Shape:
    """Everything a compiled op depends on: R rows, T tokens, table width M, N blocks, and the static options."""

    R: int
    T: int
    M: int = 12
    N: int = 60
    K: int = 2
    G: int = 3
    h: int = 8
    kv_dtype: jnp.dtype = jnp.float32
    q_dtype: jnp.dtype = jnp.float32
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    tree_words: int = 0


SHAPES = (
    Shape(R=6, T=64),
    Shape(R=6, T=6, G=1, window=S + 1, kv_dtype=jnp.float16),
    Shape(R=6, T=64, G=4, K=1, kv_dtype=jnp.bfloat16, soft_cap=2.0),
    Shape(R=4, T=32, G=7, K=1, kv_dtype=jnp.int8, sinks=True, window=1),
    Shape(R=3, T=48, G=8, K=1, kv_dtype=jnp.float8_e4m3fn, window=1000),
    Shape(R=6, T=64, kv_dtype=jnp.uint16),
    Shape(R=6, T=6, kv_dtype=jnp.uint8),
    Shape(R=3, T=48, kv_dtype=jnp.float8_e5m2, soft_cap=2.0, sinks=True, window=S),
    Shape(R=1, T=1, K=1, h=16),
    Shape(R=6, T=64, tree_words=2),
    Shape(R=6, T=64, tree_words=1, window=S + 30, kv_dtype=jnp.float16, soft_cap=2.0),
    Shape(R=3, T=12, K=1, G=16, h=96),
    Shape(R=3, T=3, G=1, h=80, kv_dtype=jnp.bfloat16),
)


def inputs(
    shape: Shape, rows: Rows, canary: float = np.nan, seed: int = 0
) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
    """Arguments of the op for ``rows`` of (tokens of this step, context length), and its array options.

    What no sequence owns holds ``canary``; table entries past the context are garbage.
    """
    rng = np.random.default_rng(seed)
    blocks = [-(-context // S) for _, context in rows]
    ids = rng.permutation(np.arange(1, shape.N))
    assert sum(blocks) <= len(ids)
    assert sum(n for n, _ in rows) <= shape.T
    garbage = [0, -1, 7, shape.N, 2**31 - 1, -(2**31)]
    table_RM = rng.choice(garbage, size=(shape.R, shape.M))
    owned_NS = np.zeros((shape.N, S), bool)
    for row, (_, context) in enumerate(rows):
        table_RM[row, : blocks[row]], ids = ids[: blocks[row]], ids[blocks[row] :]
        for i in range(context):
            owned_NS[table_RM[row, i // S], i % S] = True
    padding = [(0, 0)] * (shape.R - len(rows))
    length_R, context_R = np.array([*rows, *padding]).reshape(-1, 2).T
    start_Q = np.concatenate([[0], np.cumsum(length_R)])
    integers = [jnp.asarray(x.astype(np.int32)) for x in (table_RM, start_Q, context_R)]
    H = shape.K * shape.G
    q_THh = jnp.asarray(rng.normal(size=(shape.T, H, shape.h)), shape.q_dtype)
    pools = [_pool(shape, owned_NS, canary, rng) for _ in range(2)]
    options = {}
    if shape.sinks:
        options["sinks_H"] = jnp.asarray(rng.normal(size=H), jnp.float32)
    if jnp.dtype(shape.kv_dtype).itemsize == 1:
        options["k_scale_K"] = jnp.asarray(rng.uniform(0.01, 0.05, shape.K), jnp.float32)
        options["v_scale_K"] = jnp.asarray(rng.uniform(0.5, 2.0, shape.K), jnp.float32)
    if shape.tree_words:
        options["ancestors_TU"] = jnp.asarray(tree_masks(shape, rows, rng))
    return (q_THh, *pools, *integers), options


def tree_masks(shape: Shape, rows: Rows, rng: np.random.Generator) -> np.ndarray:
    """Random trees, parents first, for every other row that fits into the masks; the other rows are causal."""
    masks_TU = np.zeros((shape.T, shape.tree_words), np.uint32)
    start = 0
    for index, (tokens, _) in enumerate(rows):
        if index % 2 == 0 and tokens <= 32 * shape.tree_words:
            for node in range(tokens):
                if node:
                    masks_TU[start + node] = masks_TU[start + rng.integers(node)]
                masks_TU[start + node, node // 32] |= np.uint32(1 << node % 32)
        start += tokens
    return masks_TU.view(np.int32)


def _pool(shape: Shape, owned_NS: np.ndarray, canary: float, rng: np.random.Generator) -> jax.Array:
    integer = shape.kv_dtype == jnp.int8
    x = rng.normal(size=(shape.N, shape.K, S, shape.h)) * (40 if integer else 1)
    x = np.where(owned_NS[:, None, :, None], x, 127 if integer else canary)
    values = jnp.asarray(x.astype(np.float32)).astype(value_dtype(shape.kv_dtype))
    return as_stored(values, shape.kv_dtype)


@lru_cache(maxsize=64)
def _jitted(
    op: Attention, window: int | None, soft_cap: float | None, compiler_options: tuple[tuple[str, int], ...]
) -> Attention:
    return jax.jit(
        lambda *args, **options: op(*args, scale=0.4, window=window, soft_cap=soft_cap, **options),
        compiler_options=dict(compiler_options),
    )


def run(
    op: Attention,
    shape: Shape,
    args: tuple[jax.Array, ...],
    options: dict[str, jax.Array],
    compiler_options: tuple[tuple[str, int], ...] = (),
) -> np.ndarray:
    """The op, jitted as in a model, in float32."""
    jitted = _jitted(op, shape.window, shape.soft_cap, compiler_options)
    return np.asarray(jitted(*args, **options).astype(jnp.float32))


@st.composite
def batches(draw: st.DrawFn, shape: Shape) -> Rows:
    """Mixed batches with the lengths at which paged attention breaks: around blocks, and full tables."""
    full = shape.M * S
    rows: list[tuple[int, int]] = []
    room = shape.T
    for _ in range(draw(st.integers(0, min(shape.R, 4)))):
        context = draw(st.sampled_from([1, S - 1, S, S + 1, 2 * S, full - 1, full]))
        tokens = min(draw(st.sampled_from([0, 1, 1, 2, context])), context, room)
        room -= tokens
        rows.append((tokens, context))
    return tuple(rows)


def solo(args: tuple[jax.Array, ...], row: int) -> tuple[jax.Array, ...]:
    """The arguments for one row of a batch alone: first in a batch of the same shape, so that nothing compiles."""
    q, k, v, table, start_Q, context_R = args
    tokens, R = int(start_Q[row + 1] - start_Q[row]), table.shape[0]
    start = jnp.asarray([0] + [tokens] * R, jnp.int32)
    context = jnp.zeros_like(context_R).at[0].set(context_R[row])
    return jnp.roll(q, -int(start_Q[row]), axis=0), k, v, jnp.roll(table, -row, axis=0), start, context


class AttentionContract:
    """Tests of one backend.

    Attributes:
        op: what is tested.
        shapes: that it serves.
        pool_dtypes: that it serves, or pytest parameters of them.
        compiler_options: of the compiled tests of the op: kernels that are interpreted need little optimization.
    """

    op: staticmethod
    shapes: tuple[Shape, ...] = SHAPES
    pool_dtypes: tuple[Any, ...] = KV_DTYPES
    compiler_options: tuple[tuple[str, int], ...] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for name, values in (("served_shape", self.shapes), ("pool_dtype", self.pool_dtypes)):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values)

    def run(self, shape: Shape, args: tuple[jax.Array, ...], options: dict[str, jax.Array]) -> np.ndarray:
        return run(self.op, shape, args, options, self.compiler_options)

    def test_parity(self, served_shape: Shape) -> None:
        shape = served_shape

        @settings(max_examples=20, deadline=None)
        @given(rows=batches(shape), seed=st.integers(0, 99))
        def check(rows: Rows, seed: int) -> None:
            args, options = inputs(shape, rows, seed=seed)
            want, got = run(reference, shape, args, options), self.run(shape, args, options)
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)

        check()

    def test_long_contexts(self, pool_dtype: jnp.dtype) -> None:
        """Several chunks of the context, and several tiles of queries."""
        shape = Shape(R=8, T=160, M=80, N=500, kv_dtype=pool_dtype)
        args, options = inputs(shape, ((1, 301), (90, 301), (1, 128), (1, 129), (33, 256), (5, 300)))
        want, got = run(reference, shape, args, options), self.run(shape, args, options)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)

    @pytest.mark.parametrize("window", [100, 128, 129])
    def test_window_over_chunks(self, window: int) -> None:
        shape = Shape(R=5, T=94, M=80, N=300, window=window)
        args, options = inputs(shape, ((1, 301), (90, 301), (1, 128), (1, 129), (1, 60)))
        want, got = run(reference, shape, args, options), self.run(shape, args, options)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)

    def test_bfloat16_queries(self) -> None:
        shape = Shape(R=2, T=10, kv_dtype=jnp.bfloat16, q_dtype=jnp.bfloat16)
        args, options = inputs(shape, ((1, 30), (9, 9)))
        want, got = run(reference, shape, args, options), self.run(shape, args, options)
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2)

    @pytest.mark.parametrize("canary", [np.nan, 1e38])
    @pytest.mark.parametrize("rows", [((1, 6),), ((1, 1), (1, 5), (1, 9)), ((1, 1), (5, 5), (9, 9))])
    def test_kvc_08_trash_block_reaches_nothing(self, rows: Rows, canary: float) -> None:
        """Block 0 and every foreign slot hold NaN or 1e38: outputs are those of rows alone in a clean pool, padding
        is 0. The choice left open by the case: block 0 is reserved, and it is also the target of padding."""
        shape = Shape(R=4, T=4 if all(n == 1 for n, _ in rows) else 16)
        args, options = inputs(shape, rows, canary)
        got = self.run(shape, args, options)
        assert np.isfinite(got).all()
        start_Q = np.asarray(args[4])
        assert (got[start_Q[len(rows)] :] == 0).all()
        clean, _ = inputs(shape, rows, 0.0)
        for row in range(len(rows)):
            want = self.run(shape, solo(clean, row), options)[: rows[row][0]]
            np.testing.assert_allclose(got[start_Q[row] : start_Q[row + 1]], want, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("window", [None, 70])
    def test_tree_over_long_context(self, window: int | None) -> None:
        """Trees of 64 and 40 drafts between decodes and a prefill chunk, over several chunks of the context."""
        shape = Shape(R=6, T=160, M=80, N=400, tree_words=2, window=window)
        args, options = inputs(shape, ((64, 301), (1, 130), (40, 169), (33, 256), (1, 1)))
        want, got = run(reference, shape, args, options), self.run(shape, args, options)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)

    def test_a_path_of_a_tree_is_a_chain(self) -> None:
        """The tokens on one path get what they get as consecutive tokens without the rest of the tree."""
        shape = Shape(R=2, T=8, tree_words=1)
        args, _ = inputs(shape, ((5, 21),))
        q, k, v, table, _, context_R = args
        path = [0, 2, 4]
        masks = np.zeros((8, 1), np.int32)
        masks[:5, 0] = [0b1, 0b11, 0b101, 0b1011, 0b10101]
        got = self.run(shape, args, {"ancestors_TU": jnp.asarray(masks)})[path]
        slots = 16 + np.array(path)
        blocks, offsets = np.asarray(table)[0, slots // S], slots % S
        at = np.asarray(table)[0, (16 + np.arange(3)) // S], (16 + np.arange(3)) % S
        k, v = (pool.at[at[0], :, at[1]].set(pool[blocks, :, offsets]) for pool in (k, v))
        chain = (
            q.at[:3].set(q[np.array(path)]),
            k,
            v,
            table,
            jnp.asarray([0, 3, 3], jnp.int32),
            context_R.at[0].set(19),
        )
        np.testing.assert_allclose(got, self.run(shape, chain, {})[:3], rtol=1e-5, atol=1e-6)

    def test_blocks_that_left_the_window_reach_nothing(self) -> None:
        """A row gives blocks away that its window has passed: their table entries are stale, others write to them."""
        window, rows = 21, ((1, 60), (7, 60), (1, 9))
        shape = Shape(R=3, T=12, M=20, window=window)
        args, options = inputs(shape, rows)
        want = self.run(shape, args, options)
        q, k, v, table, start_Q, context_R = args
        stale = np.array(table)
        for row, (tokens, context) in enumerate(rows):
            left = max(0, context - tokens - window + 1) // S
            k, v = (pool.at[table[row, :left]].set(jnp.nan) for pool in (k, v))
            stale[row, :left] = np.resize([-1, 2**30, 0], left)
        got = self.run(shape, (q, k, v, jnp.asarray(stale), start_Q, context_R), options)
        np.testing.assert_array_equal(got, want)

    def test_no_rows(self) -> None:
        shape = replace(SHAPES[7], R=2)
        args, options = inputs(shape, ())
        assert (self.run(shape, args, options) == 0).all()

    def test_own_nan_stays_in_its_row(self) -> None:
        """A sequence with a NaN of its own gets NaN, and only that sequence."""
        shape = Shape(R=3, T=6)
        args, options = inputs(shape, ((1, 9), (1, 9), (4, 9)))
        want = self.run(shape, args, options)
        block = int(args[3][1, 0])
        args = (args[0], args[1].at[block].set(jnp.nan), *args[2:])
        got = self.run(shape, args, options)
        assert np.isnan(got[1]).all()
        np.testing.assert_array_equal(got[[0, 2, 3, 4, 5]], want[[0, 2, 3, 4, 5]])
