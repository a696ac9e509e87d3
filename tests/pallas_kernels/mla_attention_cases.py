"""The contract of the latent attention: every backend's test class inherits ``MlaAttentionContract``."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.kv_storage import as_stored, value_dtype
from pallas_kernels.mla_attention.reference import mla_attention as reference
from tests.pallas_kernels.compiled import options_for
from tests.pallas_kernels.kv_write_cases import POOL_DTYPES, stored_bits
from tests.pallas_kernels.picking import Picks, picked_shapes
from tests.support.compiling import OPTIMIZED, UNOPTIMIZED

S = 4
Rows = tuple[tuple[int, int], ...]
Op = Callable[..., jax.Array]


@dataclass(frozen=True)
class Shape:
    """What a compiled op depends on: R rows, T tokens, table width M, N blocks, H heads, widths r and d."""

    R: int = 6
    T: int = 12
    M: int = 300
    N: int = 1500
    H: int = 4
    r: int = 16
    d: int = 8
    kv_dtype: jnp.dtype = jnp.float32
    q_dtype: jnp.dtype = jnp.float32


SHAPES = (
    Shape(),
    Shape(M=12, T=5, H=16, kv_dtype=jnp.bfloat16, q_dtype=jnp.bfloat16),
    Shape(M=12, H=6, r=24, kv_dtype=jnp.int8),
    Shape(R=1, T=1, H=1, kv_dtype=jnp.float8_e4m3fn),
)
TREES = Shape(R=5, T=14)


@st.composite
def any_shape(draw: st.DrawFn, dtypes: tuple[jnp.dtype, ...]) -> Shape:
    R, M = draw(st.integers(1, 8)), draw(st.integers(1, 40))
    return Shape(
        R=R,
        T=draw(st.integers(1, 20)),
        M=M,
        N=4 * M + 1 + draw(st.integers(0, 9)),
        H=draw(st.integers(1, 20)),
        r=draw(st.sampled_from([8, 16, 24, 40, 64])),
        d=draw(st.sampled_from([2, 8, 24, 32])),
        kv_dtype=draw(st.sampled_from(dtypes)),
        q_dtype=draw(st.sampled_from([jnp.float32, jnp.bfloat16])),
    )


def inputs(
    shape: Shape, rows: Rows, canary: float = np.nan, seed: int = 0
) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
    """Arguments of the op for ``rows`` of (tokens of this step, context length), and its scales.

    What no sequence owns holds ``canary``; table entries past the context are garbage.
    """
    rng = np.random.default_rng(seed)
    ids = rng.permutation(np.arange(1, shape.N))
    table_RM = rng.choice([0, -1, 7, shape.N, 2**30, 2**31 - 1, -(2**31)], size=(shape.R, shape.M))
    owned_NS = np.zeros((shape.N, S), bool)
    for row, (_, context) in enumerate(rows):
        blocks = -(-context // S)
        table_RM[row, :blocks], ids = ids[:blocks], ids[blocks:]
        at = np.arange(context)
        owned_NS[table_RM[row, at // S], at % S] = True
    length_R, context_R = np.array([*rows, *[(0, 0)] * (shape.R - len(rows))]).reshape(-1, 2).T
    integers = [table_RM, np.concatenate([[0], np.cumsum(length_R)]), context_R]
    q = [jnp.asarray(rng.normal(size=(shape.T, shape.H, e)), shape.q_dtype) for e in (shape.r, shape.d)]
    pools = [_pool(shape, e, owned_NS, canary, rng) for e in (shape.r, shape.d)]
    options = {}
    if jnp.dtype(shape.kv_dtype).itemsize == 1:
        options["latent_scale_K"] = jnp.asarray(rng.uniform(0.02, 0.05, 1), jnp.float32)
        options["rope_scale_K"] = jnp.asarray(rng.uniform(0.02, 0.05, 1), jnp.float32)
    return (*q, *pools, *(jnp.asarray(x.astype(np.int32)) for x in integers)), options


def _pool(
    shape: Shape, width: int, owned_NS: np.ndarray, canary: float, rng: np.random.Generator
) -> jax.Array:
    integer = shape.kv_dtype == jnp.int8
    quantized = jnp.dtype(shape.kv_dtype).itemsize == 1
    x = rng.normal(size=(shape.N, 1, S, width)) * (40 if quantized else 1)
    x = np.where(owned_NS[:, None, :, None], x, 127 if integer else canary)
    return as_stored(jnp.asarray(x.astype(np.float32)).astype(value_dtype(shape.kv_dtype)), shape.kv_dtype)


@lru_cache
def _jitted(op: Op, optimize: bool) -> Op:
    return jax.jit(
        lambda *args, **options: op(*args, scale=0.2, **options),
        compiler_options=OPTIMIZED if optimize else UNOPTIMIZED,
    )


def run(op: Op, args: tuple[jax.Array, ...], options: dict[str, jax.Array], bits: bool = False) -> np.ndarray:
    """The op, jitted as in a model, in float32; where bits are compared, as it is compiled there."""
    optimize = bits and options_for(op) == OPTIMIZED
    return np.asarray(_jitted(op, optimize)(*args, **options).astype(jnp.float32))


@st.composite
def batches(draw: st.DrawFn, shape: Shape) -> Rows:
    """Mixed batches with the lengths at which paged attention breaks: around blocks, and full tables."""
    full = shape.M * S
    rows: list[tuple[int, int]] = []
    room = shape.T
    for _ in range(draw(st.integers(0, min(shape.R, 4)))):
        context = draw(st.sampled_from([1, S - 1, S, S + 1, 2 * S, full - 1, full]) | st.integers(1, full))
        context = min(max(context, 1), full)
        tokens = min(draw(st.sampled_from([0, 1, 1, 2, 5])), context, room)
        room -= tokens
        rows.append((tokens, context))
    return tuple(rows)


def solo(args: tuple[jax.Array, ...], row: int) -> tuple[jax.Array, ...]:
    """The arguments for one row of a batch alone: first in a batch of the same shape, so that nothing compiles."""
    q_latent, q_rope, latent, rope, table, start_Q, context_R = args
    tokens, R = int(start_Q[row + 1] - start_Q[row]), table.shape[0]
    start = jnp.asarray([0] + [tokens] * R, jnp.int32)
    context = jnp.zeros_like(context_R).at[0].set(context_R[row])
    q = (jnp.roll(x, -int(start_Q[row]), axis=0) for x in (q_latent, q_rope))
    return *q, latent, rope, jnp.roll(table, -row, axis=0), start, context


class MlaAttentionContract:
    """Tests of one backend; ``op`` is what is tested."""

    op: staticmethod
    typed_pools_only = False
    """Whether the backend refuses pools that hold the bits of their values (see ``kv_storage``)."""

    @picked_shapes
    def test_parity(self, picks: Picks) -> None:
        """With NaN in every slot that no sequence owns, and garbage in the stale entries of the table."""
        few = (
            SHAPES
            if self.typed_pools_only
            else tuple(replace(shape, kv_dtype=stored_bits(shape.kv_dtype)) for shape in SHAPES)
        )
        every = any_shape(tuple(dtype for dtype in POOL_DTYPES if self._serves(dtype)))

        @picks.settings(few)
        @given(shape=picks.shapes(few, every), data=st.data(), seed=st.integers(0, 99))
        def check(shape: Shape, data: st.DataObject, seed: int) -> None:
            rows = data.draw(batches(shape))
            args, options = inputs(shape, rows, seed=seed)
            want, got = run(reference, args, options), run(self.op, args, options)
            assert np.isfinite(got).all()
            tolerance = 3e-5 if shape.q_dtype == jnp.float32 else 2e-2
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)

        check()

    def test_long_contexts(self) -> None:
        """Several chunks of the context, shares of it that are merged, and rows with several tokens."""
        args, options = inputs(Shape(), ((1, 1200), (5, 1001), (1, 128), (1, 129), (3, 256), (1, 255)))
        want, got = run(reference, args, options), run(self.op, args, options)
        np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-5)

    @pytest.mark.parametrize("canary", [np.nan, 1e38])
    def test_kvc_08_foreign_slots_reach_nothing(self, canary: float) -> None:
        """Block 0 and every foreign slot hold NaN or 1e38: outputs are those of rows alone in a clean pool, bit for
        bit, and padding is 0."""
        rows = ((1, 1), (4, 5), (1, 9), (2, 600))
        args, options = inputs(Shape(), rows, canary)
        got = run(self.op, args, options, bits=True)
        assert np.isfinite(got).all()
        start_Q = np.asarray(args[5])
        assert (got[start_Q[len(rows)] :] == 0).all()
        clean, _ = inputs(Shape(), rows, 0.0)
        for row, (tokens, _) in enumerate(rows):
            want = run(self.op, solo(clean, row), options, bits=True)[:tokens]
            np.testing.assert_array_equal(got[start_Q[row] : start_Q[row + 1]], want)

    def test_trees_of_drafts(self) -> None:
        """Trees of 5 and 4 drafts between a decode, a chunk and padding, over several chunks of the context."""
        args, options = inputs(TREES, ((5, 301), (1, 130), (4, 257), (2, 9)))
        masks_TU = np.zeros((TREES.T, 2), np.int32)
        masks_TU[:5, 0] = [0b1, 0b11, 0b101, 0b1011, 0b10101]
        masks_TU[6:10, 0] = [0b1, 0b11, 0b111, 0b1001]
        options["ancestors_TU"] = jnp.asarray(masks_TU)
        want, got = run(reference, args, options), run(self.op, args, options)
        np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-5)
        del options["ancestors_TU"]
        assert np.abs(want - run(reference, args, options)).max() > 1e-3, "the masks make no difference"

    def test_no_rows(self) -> None:
        args, options = inputs(Shape(), ())
        assert (run(self.op, args, options) == 0).all()

    def test_own_nan_stays_in_its_row(self) -> None:
        """A sequence with a NaN of its own gets NaN, and only that sequence."""
        args, options = inputs(Shape(), ((1, 9), (1, 9), (4, 9)))
        want = run(self.op, args, options, bits=True)
        block = int(args[4][1, 0])
        broken = (*args[:2], args[2].at[block].set(jnp.nan), *args[3:])
        got = run(self.op, broken, options, bits=True)
        assert np.isnan(got[1]).all()
        np.testing.assert_array_equal(got[[0, 2, 3, 4, 5]], want[[0, 2, 3, 4, 5]])

    def _serves(self, dtype: jnp.dtype) -> bool:
        return not self.typed_pools_only or value_dtype(dtype) == dtype
