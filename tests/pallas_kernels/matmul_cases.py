"""The contracts of ``linear`` and ``grouped_matmul``: every backend's test class inherits them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul.reference import grouped_matmul as grouped_reference
from pallas_kernels.linear.reference import linear as linear_reference

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2, jnp.float16: 2e-3}


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Normal numbers, scaled so that products are about 1."""
    return jnp.asarray(rng.normal(size=shape) / shape[-1] ** 0.25, dtype)


class LinearContract:
    """Tests of one backend; ``op`` is what is tested."""

    op: staticmethod

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("dtypes", [(jnp.float32,) * 2, (jnp.bfloat16,) * 2, (jnp.bfloat16, jnp.float32)])
    @pytest.mark.parametrize("T", [1, 2, 5, 33, 70])
    def test_parity(self, T: int, dtypes: tuple[jnp.dtype, jnp.dtype], bias: bool) -> None:
        rng = np.random.default_rng(T)
        x_TI, w_OI = draw(rng, (T, 40), dtypes[0]), draw(rng, (24, 40), dtypes[1])
        bias_O = draw(rng, (24,), dtypes[1]) if bias else None
        got = jax.jit(self.op)(x_TI, w_OI, bias_O)
        assert got.dtype == x_TI.dtype
        tolerance = TOLERANCE[dtypes[0]]
        want = linear_reference(x_TI, w_OI, bias_O)
        np.testing.assert_allclose(
            *(np.asarray(y, np.float32) for y in (got, want)), rtol=tolerance, atol=tolerance
        )

    def test_out_dtype_is_not_rounded_before(self) -> None:
        rng = np.random.default_rng(0)
        x_TI, w_OI = draw(rng, (3, 40), jnp.bfloat16), draw(rng, (24, 40), jnp.bfloat16)
        got = jax.jit(lambda x, w: self.op(x, w, out_dtype=jnp.float32))(x_TI, w_OI)
        assert got.dtype == jnp.float32
        want = linear_reference(x_TI, w_OI, out_dtype=jnp.float32)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("T", [2, 8, 33, 70])
    def test_rows_do_not_depend_on_neighbours(self, T: int) -> None:
        """A row's result is the same bits whatever the other rows of its bucket hold, NaN included."""
        rng = np.random.default_rng(T)
        x_TI, w_OI = draw(rng, (T, 96), jnp.float32), draw(rng, (64, 96), jnp.float32)
        op = jax.jit(self.op)
        want = np.asarray(op(x_TI, w_OI))
        for row in (0, T - 1):
            others = jnp.full_like(x_TI, jnp.nan).at[row].set(x_TI[row])
            np.testing.assert_array_equal(np.asarray(op(others, w_OI))[row], want[row])


class GroupedMatmulContract:
    """Tests of one backend; ``op`` is what is tested."""

    op: staticmethod

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    @pytest.mark.parametrize("T", [1, 20, 70])
    def test_parity(self, T: int, dtype: jnp.dtype) -> None:
        E = 4
        op, oracle = jax.jit(self.op), jax.jit(grouped_reference)

        @settings(max_examples=15, deadline=None)
        @given(cuts=st.lists(st.integers(0, T), min_size=E, max_size=E), seed=st.integers(0, 99))
        def check(cuts: list[int], seed: int) -> None:
            rng = np.random.default_rng(seed)
            sizes_E = jnp.asarray(np.diff(sorted(cuts), prepend=0), jnp.int32)
            x_TI, w_EOI = draw(rng, (T, 16), dtype), draw(rng, (E, 24, 16), dtype)
            want, got = oracle(x_TI, w_EOI, sizes_E), op(x_TI, w_EOI, sizes_E)
            assert got.dtype == dtype
            tolerance = TOLERANCE[dtype]
            np.testing.assert_allclose(
                *(np.asarray(y, np.float32) for y in (got, want)), rtol=tolerance, atol=tolerance
            )
            assert (np.asarray(got, np.float32)[int(sizes_E.sum()) :] == 0).all()

        check()

    def test_foreign_rows_reach_nothing(self) -> None:
        """NaN in the rows of one expert, or in rows of none, stays there."""
        rng = np.random.default_rng(0)
        x_TI, w_EOI = draw(rng, (20, 16), jnp.float32), draw(rng, (3, 24, 16), jnp.float32)
        sizes_E = jnp.asarray([5, 0, 9], jnp.int32)
        op = jax.jit(self.op)
        want = np.asarray(op(x_TI, w_EOI, sizes_E))
        got = np.asarray(op(x_TI.at[5:].set(jnp.nan), w_EOI, sizes_E))
        np.testing.assert_array_equal(got[:5], want[:5])
        assert (got[14:] == 0).all()
