"""The contracts of the ops that end in a quantized row: every backend's test class inherits them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.gate_quantize.reference import gate_quantize as gate_reference
from pallas_kernels.quantize_rows.reference import quantize_rows as rows_reference
from pallas_kernels.rms_norm_quantize.reference import rms_norm_quantize as norm_reference
from tests.pallas_kernels.compiled import options_for
from tests.pallas_kernels.picking import Picks, picked_shapes


@dataclass(frozen=True)
class Shape:
    """What a compiled op depends on: T rows of some width, their dtype, and the format of the result; for a norm
    whether there is a residual, for a gate its activation."""

    T: int
    width: int
    dtype: jnp.dtype
    to: str
    residual: bool = False
    activation: str = "silu"


SHAPES = (
    Shape(5, 40, jnp.bfloat16, "fp8", residual=True),
    Shape(7, 64, jnp.float16, "int8"),
    Shape(1, 130, jnp.float32, "fp8", residual=True, activation="gelu_tanh"),
)
any_shape = st.builds(
    Shape,
    T=st.integers(1, 20),
    width=st.integers(1, 300),
    dtype=st.sampled_from([jnp.bfloat16, jnp.float16, jnp.float32]),
    to=st.sampled_from(["fp8", "int8"]),
    residual=st.booleans(),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
)


@lru_cache
def _jitted(op: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    return jax.jit(partial(op, **static), compiler_options=options_for(op))


def shape_property(picks: Picks, check: Callable[[Shape, int], None]) -> None:
    """Runs ``check(shape, seed)`` for picked shapes, each of the list among them."""
    if not picks.free:
        for shape in SHAPES:
            check(shape, 0)
    more = replace(picks, per_shape=2).settings(SHAPES)
    more(given(picks.shapes(SHAPES, any_shape), st.integers(1, 99))(check))()


def rows(T: int, width: int, dtype: Any, seed: int) -> jax.Array:
    """Normal numbers; the first of several rows is 0, the others differ in magnitude."""
    rng = np.random.default_rng(seed)
    magnitude_T1 = np.resize([0, 1, 4, 16, 64] if T > 1 else [4], T)[:, None]
    return jnp.asarray(rng.normal(size=(T, width)) * magnitude_T1, dtype)


def assert_same_rows(got: tuple[jax.Array, ...], want: tuple[jax.Array, ...], dtype: Any) -> None:
    """Quantized numbers may differ by one step, and only rarely; scales by a rounding of their row's dtype."""
    (q, scale_T), (want_q, want_scale_T) = got[:2], want[:2]
    assert (q.dtype, scale_T.dtype) == (want_q.dtype, want_scale_T.dtype)
    rounding = {jnp.bfloat16: 2**-7, jnp.float16: 2**-10, jnp.float32: 1e-5}[dtype]
    np.testing.assert_allclose(scale_T, want_scale_T, rtol=rounding)
    q, want_q = np.asarray(q, np.float32), np.asarray(want_q, np.float32)
    step = 1.0 if got[0].dtype == jnp.int8 else np.maximum(np.abs(want_q) / 8, 2.0**-9)
    assert (np.abs(q - want_q) <= step * 1.01).all()
    assert (q != want_q).sum() <= max(2, 0.02 * q.size)


class QuantizeRowsContract:
    """Tests of one backend; ``op`` is what is tested."""

    op: staticmethod

    @picked_shapes
    def test_parity(self, picks: Picks) -> None:
        def check(shape: Shape, seed: int) -> None:
            x_TD = rows(shape.T, shape.width, shape.dtype, seed)
            got, want = (_jitted(op, to=shape.to)(x_TD) for op in (self.op, rows_reference))
            assert_same_rows(got, want, shape.dtype)

        shape_property(picks, check)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_rows_that_are_not_finite_show_it(self, bad: float) -> None:
        _, scale_T = _jitted(self.op, to="int8")(rows(4, 40, jnp.float32, 0).at[2, 7].set(bad))
        np.testing.assert_array_equal(np.isfinite(scale_T), [True, True, False, True])


class RmsNormQuantizeContract:
    """Tests of one backend; ``op`` is what is tested."""

    op: staticmethod

    @picked_shapes
    def test_parity(self, picks: Picks) -> None:
        def check(shape: Shape, seed: int) -> None:
            D, dtype = shape.width, shape.dtype
            residual_TD = rows(shape.T, D, dtype, seed + 1) if shape.residual else None
            args = (rows(shape.T, D, dtype, seed), jnp.linspace(0.5, 1.5, D, dtype=jnp.float32), residual_TD)
            got, want = (_jitted(op, eps=1e-5, to=shape.to)(*args) for op in (self.op, norm_reference))
            assert_same_rows(got, want, dtype)
            assert got[2].dtype == dtype
            np.testing.assert_array_equal(*(np.asarray(y[2], np.float32) for y in (got, want)))

        shape_property(picks, check)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_rows_that_are_not_finite_show_it_and_stay_alone(self, bad: float) -> None:
        x_TD, weight_D = rows(4, 40, jnp.float32, 0), jnp.ones(40)
        op = _jitted(self.op, eps=1e-5, to="int8")
        want, got = op(x_TD, weight_D), op(x_TD.at[2, 7].set(bad), weight_D)
        assert not np.isfinite(np.asarray(got[1])[2])
        others = np.array([0, 1, 3])
        for a, b in zip(got[:2], want[:2]):
            np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])


class GateQuantizeContract:
    """Tests of one backend; ``op`` is what is tested."""

    op: staticmethod

    @picked_shapes
    def test_parity(self, picks: Picks) -> None:
        def check(shape: Shape, seed: int) -> None:
            x_T2F = rows(shape.T, 2 * shape.width, shape.dtype, seed)
            got, want = (
                _jitted(op, activation=shape.activation, to=shape.to)(x_T2F)
                for op in (self.op, gate_reference)
            )
            assert_same_rows(got, want, shape.dtype)

        shape_property(picks, check)

    def test_rows_that_are_not_finite_show_it(self) -> None:
        x_T2F = rows(4, 80, jnp.float32, 0).at[2, 7].set(jnp.nan)
        _, scale_T = _jitted(self.op, activation="silu", to="int8")(x_T2F)
        np.testing.assert_array_equal(np.isfinite(scale_T), [True, True, False, True])
