"""The contracts of the ops that end in a quantized row: every backend's test class inherits them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gate_quantize.reference import gate_quantize as gate_reference
from pallas_kernels.quantize_rows.reference import quantize_rows as rows_reference
from pallas_kernels.rms_norm_quantize.reference import rms_norm_quantize as norm_reference

FORMATS = ((jnp.bfloat16, "fp8"), (jnp.float16, "int8"), (jnp.float32, "fp8"))


def rows(T: int, width: int, dtype: Any, seed: int) -> jax.Array:
    """Normal numbers; the first row is 0, the others differ in magnitude."""
    rng = np.random.default_rng(seed)
    magnitude_T1 = np.array([0, 1, 4, 16, 64])[:T, None]
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
    assert (q != want_q).mean() < 0.02


class QuantizeRowsContract:
    """Tests of one backend; ``op`` is what is tested."""

    op: staticmethod

    @pytest.mark.parametrize(("dtype", "to"), FORMATS)
    def test_parity(self, dtype: Any, to: str) -> None:
        x_TD = rows(5, 40, dtype, 0)
        got = jax.jit(lambda x: self.op(x, to=to))(x_TD)
        assert_same_rows(got, jax.jit(lambda x: rows_reference(x, to=to))(x_TD), dtype)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_rows_that_are_not_finite_show_it(self, bad: float) -> None:
        _, scale_T = jax.jit(lambda x: self.op(x, to="int8"))(rows(4, 40, jnp.float32, 0).at[2, 7].set(bad))
        np.testing.assert_array_equal(np.isfinite(scale_T), [True, True, False, True])


class RmsNormQuantizeContract:
    """Tests of one backend; ``op`` is what is tested."""

    op: staticmethod

    @pytest.mark.parametrize(("dtype", "to"), FORMATS)
    def test_parity(self, dtype: Any, to: str) -> None:
        residual = to == "fp8"
        D = 40 if residual else 64
        x_TD, weight_D = rows(5, D, dtype, 0), jnp.linspace(0.5, 1.5, D, dtype=jnp.float32)
        args = (x_TD, weight_D, rows(5, D, dtype, 1) if residual else None)
        got = jax.jit(lambda *a: self.op(*a, eps=1e-5, to=to))(*args)
        want = jax.jit(lambda *a: norm_reference(*a, eps=1e-5, to=to))(*args)
        assert_same_rows(got, want, dtype)
        assert got[2].dtype == dtype
        np.testing.assert_array_equal(*(np.asarray(y[2], np.float32) for y in (got, want)))

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_rows_that_are_not_finite_show_it_and_stay_alone(self, bad: float) -> None:
        x_TD, weight_D = rows(4, 40, jnp.float32, 0), jnp.ones(40)
        op = jax.jit(lambda x: self.op(x, weight_D, eps=1e-5, to="int8"))
        want, got = op(x_TD), op(x_TD.at[2, 7].set(bad))
        assert not np.isfinite(np.asarray(got[1])[2])
        others = np.array([0, 1, 3])
        for a, b in zip(got[:2], want[:2]):
            np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])


class GateQuantizeContract:
    """Tests of one backend; ``op`` is what is tested."""

    op: staticmethod

    @pytest.mark.parametrize(("dtype", "to"), FORMATS)
    def test_parity(self, dtype: Any, to: str) -> None:
        F, activation = (64, "gelu_tanh") if dtype == jnp.float32 else (40, "silu")
        x_T2F = rows(5, 2 * F, dtype, 2)
        got = jax.jit(lambda x: self.op(x, activation=activation, to=to))(x_T2F)
        want = jax.jit(lambda x: gate_reference(x, activation=activation, to=to))(x_T2F)
        assert_same_rows(got, want, dtype)

    def test_rows_that_are_not_finite_show_it(self) -> None:
        x_T2F = rows(4, 80, jnp.float32, 0).at[2, 7].set(jnp.nan)
        _, scale_T = jax.jit(lambda x: self.op(x, activation="silu", to="int8"))(x_T2F)
        np.testing.assert_array_equal(np.isfinite(scale_T), [True, True, False, True])
