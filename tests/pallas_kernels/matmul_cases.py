"""The contracts of ``linear`` and ``grouped_matmul``: every backend's test class inherits them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul.reference import grouped_matmul as grouped_reference
from pallas_kernels.linear.reference import linear as linear_reference
from tests.pallas_kernels.compiled import jitted
from tests.pallas_kernels.picking import Picks, picked_shapes

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2, jnp.float16: 2e-3}


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Normal numbers, scaled so that products are about 1."""
    return jnp.asarray(rng.normal(size=shape) / shape[-1] ** 0.25, dtype)


class LinearContract:
    """Tests of one backend; ``op`` is what is tested."""

    op: staticmethod

    @pytest.mark.parametrize("dtypes", [(jnp.float32,) * 2, (jnp.bfloat16,) * 2, (jnp.bfloat16, jnp.float32)])
    @pytest.mark.parametrize(
        ("T", "bias"), [(1, True), (1, False), (2, False), (5, True), (33, False), (70, True)]
    )
    def test_parity(self, T: int, bias: bool, dtypes: tuple[jnp.dtype, jnp.dtype]) -> None:
        self.check(T, 24, 40, dtypes, bias)

    def test_any_shape(self) -> None:
        @settings(max_examples=10, deadline=None)
        @given(
            T=st.integers(1, 80),
            O=st.integers(1, 80),
            I=st.integers(1, 80),
            dtypes=st.sampled_from([(jnp.float32,) * 2, (jnp.bfloat16,) * 2, (jnp.float16, jnp.float32)]),
            bias=st.booleans(),
        )
        def check(T: int, O: int, I: int, dtypes: tuple[jnp.dtype, jnp.dtype], bias: bool) -> None:
            self.check(T, O, I, dtypes, bias)

        check()

    def check(self, T: int, O: int, I: int, dtypes: tuple[jnp.dtype, jnp.dtype], bias: bool) -> None:
        rng = np.random.default_rng(T)
        x_TI, w_OI = draw(rng, (T, I), dtypes[0]), draw(rng, (O, I), dtypes[1])
        bias_O = draw(rng, (O,), dtypes[1]) if bias else None
        got = jitted(self.op)(x_TI, w_OI, bias_O)
        assert got.dtype == x_TI.dtype
        tolerance = TOLERANCE[dtypes[0]]
        want = jitted(linear_reference)(x_TI, w_OI, bias_O)
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
        op = jitted(self.op)
        want = np.asarray(op(x_TI, w_OI))
        for row in (0, T - 1):
            others = jnp.full_like(x_TI, jnp.nan).at[row].set(x_TI[row])
            np.testing.assert_array_equal(np.asarray(op(others, w_OI))[row], want[row])


@dataclass(frozen=True)
class GroupedShape:
    """What a compiled grouped product depends on: T rows, E experts, O outputs, I inputs."""

    T: int
    E: int
    O: int
    I: int
    dtype: jnp.dtype


GROUPED_SHAPES = (
    GroupedShape(1, 4, 24, 16, jnp.bfloat16),
    GroupedShape(20, 4, 33, 40, jnp.float32),
    GroupedShape(70, 9, 16, 17, jnp.bfloat16),
    GroupedShape(33, 1, 5, 48, jnp.float16),
)
any_grouped_shape = st.builds(
    GroupedShape,
    T=st.integers(1, 90),
    E=st.integers(1, 20),
    O=st.integers(1, 80),
    I=st.integers(1, 80),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
)


class GroupedMatmulContract:
    """Tests of one backend; ``op`` is what is tested."""

    op: staticmethod

    @picked_shapes
    def test_parity(self, picks: Picks) -> None:
        """Rows of any experts, of none, and rows past the last expert's, which give 0."""

        @picks.settings(GROUPED_SHAPES)
        @given(
            shape=picks.shapes(GROUPED_SHAPES, any_grouped_shape),
            data=st.data(),
            seed=st.integers(0, 99),
        )
        def check(shape: GroupedShape, data: st.DataObject, seed: int) -> None:
            T, E, dtype = shape.T, shape.E, shape.dtype
            cuts = data.draw(st.lists(st.integers(0, T), min_size=E, max_size=E))
            rng = np.random.default_rng(seed)
            sizes_E = jnp.asarray(np.diff(sorted(cuts), prepend=0), jnp.int32)
            x_TI, w_EOI = draw(rng, (T, shape.I), dtype), draw(rng, (E, shape.O, shape.I), dtype)
            want = jitted(grouped_reference)(x_TI, w_EOI, sizes_E)
            got = jitted(self.op)(x_TI, w_EOI, sizes_E)
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
        op = jitted(self.op)
        want = np.asarray(op(x_TI, w_EOI, sizes_E))
        got = np.asarray(op(x_TI.at[5:].set(jnp.nan), w_EOI, sizes_E))
        np.testing.assert_array_equal(got[:5], want[:5])
        assert (got[14:] == 0).all()
