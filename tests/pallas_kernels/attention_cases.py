"""The contract of ragged paged attention: every backend's test class inherits ``AttentionContract``."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention as reference

S = 4
Attention = Callable[..., jax.Array]
KV_DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)


@dataclass(frozen=True)
class Case:
    """A batch: ``rows`` holds (tokens of this step, context length) per sequence, padded to R rows and T tokens."""

    rows: tuple[tuple[int, int], ...]
    R: int
    T: int
    K: int = 2
    G: int = 3
    h: int = 8
    M: int = 12
    kv_dtype: jnp.dtype = jnp.float32
    q_dtype: jnp.dtype = jnp.float32
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    seed: int = 0


def inputs(case: Case, canary: float = np.nan, stale: bool = True) -> tuple[tuple[jax.Array, ...], dict]:
    """Arguments of the op. What no sequence owns holds ``canary``; table entries past the context are garbage."""
    rng = np.random.default_rng(case.seed)
    blocks = [-(-context // S) for _, context in case.rows]
    N = sum(blocks) + 3
    ids = rng.permutation(np.arange(1, N))
    table_RM = np.zeros((case.R, case.M), np.int64)
    if stale:
        table_RM[:] = rng.choice([0, -1, 7, N, 2**31 - 1, -(2**31)], size=table_RM.shape)
    owned_NS = np.zeros((N, S), bool)
    for row, (_, context) in enumerate(case.rows):
        table_RM[row, : blocks[row]], ids = ids[: blocks[row]], ids[blocks[row] :]
        for i in range(context):
            owned_NS[table_RM[row, i // S], i % S] = True
    shape = (N, case.K, S, case.h)
    integer = jnp.issubdtype(case.kv_dtype, jnp.integer)
    pools = []
    for _ in range(2):
        x = rng.normal(size=shape) * (40 if integer else 1)
        x = np.where(owned_NS[:, None, :, None], x, 127 if integer else canary)
        pools.append(jnp.asarray(x.astype(np.float32)).astype(case.kv_dtype))
    length_R = np.zeros(case.R, np.int64)
    context_R = np.zeros(case.R, np.int64)
    length_R[: len(case.rows)] = [n for n, _ in case.rows]
    context_R[: len(case.rows)] = [c for _, c in case.rows]
    start_Q = np.concatenate([[0], np.cumsum(length_R)])
    q = jnp.asarray(rng.normal(size=(case.T, case.K * case.G, case.h)), case.q_dtype)
    quantized = jnp.dtype(case.kv_dtype).itemsize == 1
    options = {
        "scale": 0.4,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "sinks_H": jnp.asarray(rng.normal(size=case.K * case.G), jnp.float32) if case.sinks else None,
        "k_scale_K": jnp.asarray(rng.uniform(0.01, 0.05, case.K), jnp.float32) if quantized else None,
        "v_scale_K": jnp.asarray(rng.uniform(0.01, 0.05, case.K), jnp.float32) if quantized else None,
    }
    as_int = [jnp.asarray(x.astype(np.int32)) for x in (table_RM, start_Q, context_R)]
    return (q, *pools, *as_int), options


def run(op: Attention, args: tuple[jax.Array, ...], options: dict) -> np.ndarray:
    """The op, jitted as in a model, in float32."""
    static = {k: v for k, v in options.items() if not isinstance(v, jax.Array)}
    arrays = {k: v for k, v in options.items() if isinstance(v, jax.Array)}
    out = jax.jit(lambda args, arrays: op(*args, **arrays, **static))(args, arrays)
    return np.asarray(out.astype(jnp.float32))


@st.composite
def batches(draw: st.DrawFn) -> Case:
    """Mixed batches with the lengths at which paged attention breaks: around blocks, and full tables."""
    full = 12 * S
    contexts = st.sampled_from([1, S - 1, S, S + 1, 2 * S, full - 1, full])
    rows = []
    for _ in range(draw(st.integers(0, 4))):
        context = draw(contexts)
        rows.append((draw(st.sampled_from([0, 1, 1, min(2, context), context])), context))
    T = max(sum(n for n, _ in rows) + draw(st.sampled_from([0, 3])), 1)
    G, K = draw(st.sampled_from([(1, 2), (3, 1), (4, 1), (7, 2), (8, 1)]))
    return Case(
        rows=tuple(rows),
        R=max(len(rows) + draw(st.sampled_from([0, 2])), 1),
        T=T,
        K=K,
        G=G,
        kv_dtype=draw(st.sampled_from(KV_DTYPES)),
        window=draw(st.sampled_from([None, None, 1, S, S + 1, 1000])),
        soft_cap=draw(st.sampled_from([None, None, 2.0])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


class AttentionContract:
    """Tests of one backend; ``op`` is what is tested."""

    op: staticmethod

    @settings(max_examples=25, deadline=None)
    @given(case=batches())
    def test_parity(self, case: Case) -> None:
        args, options = inputs(case)
        want = run(reference, args, options)
        got = run(self.op, args, options)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)

    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    def test_long_contexts(self, kv_dtype: jnp.dtype) -> None:
        """Several chunks of the context, and several tiles of queries."""
        rows = ((1, 301), (90, 301), (1, 128), (1, 129), (33, 256), (5, 300))
        case = Case(rows, R=8, T=160, M=80, kv_dtype=kv_dtype)
        args, options = inputs(case)
        want, got = run(reference, args, options), run(self.op, args, options)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)

    @pytest.mark.parametrize("window", [1, 100, 128, 129])
    def test_window_over_chunks(self, window: int) -> None:
        rows = ((1, 301), (90, 301), (1, 128), (1, 129), (1, 60))
        case = Case(rows, R=5, T=94, M=80, window=window)
        args, options = inputs(case)
        want, got = run(reference, args, options), run(self.op, args, options)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)

    def test_bfloat16_queries(self) -> None:
        case = Case(((1, 30), (9, 9)), R=2, T=10, kv_dtype=jnp.bfloat16, q_dtype=jnp.bfloat16)
        args, options = inputs(case)
        want, got = run(reference, args, options), run(self.op, args, options)
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2)

    @pytest.mark.parametrize("canary", [np.nan, 1e38])
    @pytest.mark.parametrize(
        ("rows", "R", "T"),
        [
            (((1, 6),), 4, 4),
            (((1, 1), (1, 5), (1, 9)), 4, 4),
            (((1, 1), (5, 5), (9, 9)), 4, 16),
        ],
    )
    def test_kvc_08_trash_block_reaches_nothing(
        self, rows: tuple[tuple[int, int], ...], R: int, T: int, canary: float
    ) -> None:
        """Block 0 and every foreign slot hold NaN or 1e38: outputs are those of rows alone in a clean pool, padding
        is 0. The choice of cases.md: block 0 is reserved, and also the target of padding."""
        args, options = inputs(Case(rows, R, T), canary)
        got = run(self.op, args, options)
        assert np.isfinite(got).all()
        clean, _ = inputs(Case(rows, R, T), 0.0)
        start_Q = np.asarray(args[4])
        assert (got[start_Q[len(rows)] :] == 0).all()
        for row, (n, context) in enumerate(rows):
            solo = (
                clean[0][start_Q[row] : start_Q[row + 1]],
                *clean[1:3],
                clean[3][row : row + 1],
                jnp.asarray([0, n], jnp.int32),
                jnp.asarray([context], jnp.int32),
            )
            want = run(self.op, solo, options)
            np.testing.assert_allclose(got[start_Q[row] : start_Q[row + 1]], want, rtol=1e-5, atol=1e-6)

    def test_no_rows(self) -> None:
        args, options = inputs(Case((), R=2, T=3, sinks=True))
        assert (run(self.op, args, options) == 0).all()

    def test_own_nan_stays_in_its_row(self) -> None:
        """A sequence with a NaN of its own gets NaN, and only that sequence."""
        case = Case(((1, 9), (1, 9), (4, 9)), R=3, T=6)
        args, options = inputs(case)
        want = run(self.op, args, options)
        block = int(args[3][1, 0])
        args = (args[0], args[1].at[block].set(jnp.nan), *args[2:])
        got = run(self.op, args, options)
        assert np.isnan(got[1]).all()
        np.testing.assert_array_equal(got[[0, 2, 3, 4, 5]], want[[0, 2, 3, 4, 5]])
