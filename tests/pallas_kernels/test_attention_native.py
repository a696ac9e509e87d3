"""Ragged paged attention by the native library: the contract, and what only this backend promises."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.native import library
from pallas_kernels.ragged_paged_attention import native
from pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention as reference
from tests.pallas_kernels.attention_cases import (
    KV_DTYPES,
    AttentionContract,
    Rows,
    S,
    Shape,
    inputs,
    run,
    solo,
)
from tests.pallas_kernels.hlo_checks import makers

pytestmark = pytest.mark.skipif(not library.available()[0], reason=library.available()[1])

# Rows on both sides of the cuts at 256 keys, of one token, of a few, and of more than one tile of queries.
LONG: Rows = ((1, 255), (1, 257), (1, 640), (5, 600), (70, 300), (1, 513))
DECODES = Shape(R=8, T=96, M=160, N=800)


class TestAttentionNative(AttentionContract):
    op = staticmethod(native.ragged_paged_attention)

    @pytest.mark.parametrize("G", [3, 8])
    @pytest.mark.parametrize("window", [None, 300])
    def test_long_rows_are_cut(self, G: int, window: int | None) -> None:
        shape = replace(DECODES, K=1, G=G, window=window, sinks=True)
        args, options = inputs(shape, LONG)
        want, got = run(reference, shape, args, options), run(self.op, shape, args, options)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)

    @pytest.mark.parametrize("kv_dtype", [jnp.float32, jnp.uint16])
    def test_rows_do_not_depend_on_neighbours(self, kv_dtype: jnp.dtype) -> None:
        """Every row's result is the same bits alone, first in its batch, as between its neighbours."""
        shape = replace(DECODES, kv_dtype=kv_dtype)
        args, options = inputs(shape, LONG)
        together, start = run(self.op, shape, args, options), np.asarray(args[4])
        for row, (tokens, _) in enumerate(LONG):
            alone = run(self.op, shape, solo(args, row), options)[:tokens]
            np.testing.assert_array_equal(alone, together[start[row] : start[row] + tokens])

    def test_a_token_does_not_depend_on_its_chunk(self) -> None:
        """The tokens of a prompt get the same bits in chunks as at once, as long as these are longer than a tile."""
        shape = replace(DECODES, T=140)
        args, options = inputs(shape, ((140, 300),))
        q, k, v, table, start, context = args
        whole = run(self.op, shape, args, options)
        first = run(self.op, shape, (q, k, v, table, start.at[1:].set(63), context.at[0].set(223)), options)
        np.testing.assert_array_equal(first[:63], whole[:63])

    @settings(max_examples=4, deadline=None)
    @given(
        K=st.integers(1, 3),
        G=st.integers(1, 9),
        h=st.integers(1, 72),
        kv_dtype=st.sampled_from(KV_DTYPES),
        rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 15)), max_size=4),
    )
    def test_any_shape(
        self, K: int, G: int, h: int, kv_dtype: jnp.dtype, rows: list[tuple[int, int]]
    ) -> None:
        shape = Shape(R=4, T=82, M=10, N=50, K=K, G=G, h=h, kv_dtype=kv_dtype)
        args, options = inputs(shape, tuple((tokens, tokens + before) for tokens, before in rows))
        want, got = run(reference, shape, args, options), run(self.op, shape, args, options)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)

    @pytest.mark.parametrize("kv_dtype", [jnp.float32, jnp.bfloat16, jnp.uint16])
    def test_pool_is_neither_copied_nor_converted(self, kv_dtype: jnp.dtype) -> None:
        """No instruction of the compiled program makes another array as large as the pool."""
        shape = Shape(R=4, T=16, N=997, kv_dtype=kv_dtype)
        args, options = inputs(shape, ((1, 20), (3, 20)))
        op = jax.jit(lambda args, options: self.op(*args, scale=0.4, **options))
        text = op.lower(args, options).compile().as_text()
        assert makers(text, (shape.N, shape.N * shape.K, shape.N * shape.K * S)) == []

    def test_numbers_do_not_depend_on_threads(self) -> None:
        """One processor for the whole process, and so one thread for XLA, gives the same bits as all of them."""
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
        code = (
            f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}});"
            f"from {__name__} import digest; print(digest())"
        )
        alone = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert alone.stdout.split()[-1] == digest()

    def test_what_is_refused(self) -> None:
        (q, k, v, *rest), _ = inputs(Shape(R=1, T=1), ((1, 1),))
        assert native.supports(q, k, v, *rest, scale=1.0) == (True, "")
        for bad, name in (
            ((q, k.astype(jnp.int32), v.astype(jnp.int32)), "int32"),
            ((q, k.astype(jnp.float16), v), "different dtypes"),
            ((q.astype(jnp.int32), k, v), "int32"),
            ((q[:, :5], k, v), "not a multiple"),
        ):
            ok, reason = native.supports(*bad, *rest, scale=1.0)
            assert not ok
            assert name in reason
            with pytest.raises(ValueError, match=name):
                native.ragged_paged_attention(*bad, *rest, scale=1.0)


def digest() -> str:
    """Of the results of a batch that is large enough for several threads."""
    args, options = inputs(DECODES, LONG)
    return hashlib.sha256(run(native.ragged_paged_attention, DECODES, args, options).tobytes()).hexdigest()
