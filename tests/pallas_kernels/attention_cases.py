"""The contract of ragged paged attention: every backend's test class inherits ``AttentionContract``."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention as reference
from tests.pallas_kernels.attention_inputs import (
    KV_DTYPES,
    MORE_SHAPES,
    SHAPES,
    Rows,
    S,
    Shape,
    any_shape,
    batches,
    inputs,
    solo,
)
from tests.pallas_kernels.picking import SLOW_EXAMPLES
from tests.support.compiling import OPTIMIZED, UNOPTIMIZED

Attention = Callable[..., jax.Array]


@lru_cache(maxsize=64)
def _jitted(op: Attention, window: int | None, soft_cap: float | None, optimize: bool) -> Attention:
    return jax.jit(
        lambda *args, **options: op(*args, scale=0.4, window=window, soft_cap=soft_cap, **options),
        compiler_options=OPTIMIZED if optimize else UNOPTIMIZED,
    )


def run(
    op: Attention,
    shape: Shape,
    args: tuple[jax.Array, ...],
    options: dict[str, jax.Array],
    optimize: bool = False,
) -> np.ndarray:
    """The op, jitted as in a model, in float32; with LLVM's optimizations for comparisons of bits."""
    jitted = _jitted(op, shape.window, shape.soft_cap, optimize)
    return np.asarray(jitted(*args, **options).astype(jnp.float32))


class AttentionContract:
    """Tests of one backend.

    Attributes:
        op: what is tested.
        shapes: that it serves; of MORE_SHAPES it serves those with the same dtypes.
        pool_dtypes: that it serves, or pytest parameters of them.
    """

    op: staticmethod
    shapes: tuple[Shape, ...] = SHAPES
    pool_dtypes: tuple[Any, ...] = KV_DTYPES

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        dtypes = {jnp.dtype(shape.kv_dtype) for shape in self.shapes}
        more = [shape for shape in MORE_SHAPES if jnp.dtype(shape.kv_dtype) in dtypes]
        shapes = [*self.shapes, *(pytest.param(shape, marks=pytest.mark.slow) for shape in more)]
        for name, values in (("served_shape", shapes), ("pool_dtype", self.pool_dtypes)):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values)

    def run(self, shape: Shape, args: tuple[jax.Array, ...], options: dict[str, jax.Array]) -> np.ndarray:
        return run(self.op, shape, args, options)

    def test_parity(self, served_shape: Shape) -> None:
        shape = served_shape

        @settings(max_examples=20, deadline=None)
        @given(rows=batches(shape), seed=st.integers(0, 99))
        def check(rows: Rows, seed: int) -> None:
            args, options = inputs(shape, rows, seed=seed)
            want, got = run(reference, shape, args, options), self.run(shape, args, options)
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)

        check()

    @pytest.mark.slow
    def test_any_shape(self) -> None:
        dtypes = tuple({jnp.dtype(shape.kv_dtype): shape.kv_dtype for shape in self.shapes}.values())

        @settings(max_examples=SLOW_EXAMPLES, deadline=None)
        @given(shape=any_shape(dtypes), data=st.data(), seed=st.integers(0, 99))
        def check(shape: Shape, data: st.DataObject, seed: int) -> None:
            args, options = inputs(shape, data.draw(batches(shape)), seed=seed)
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

    @pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 70])
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
        shape = next(shape for shape in self.shapes if shape.sinks and shape.soft_cap)
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
