"""Products with bfloat16 weights and activations rounded to bfloat16 by the native library."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.linear import native
from pallas_kernels.linear.packed import pack_dense, stack
from pallas_kernels.native.library import available
from tests.pallas_kernels.packed_cases import random_weight
from tests.pallas_kernels.test_linear_native import assert_close, weight_of

pytestmark = pytest.mark.skipif(not available()[0], reason=available()[1])

linear = jax.jit(native.linear_bf16, static_argnames="out_dtype")
T_MAX = 130


def rounded(x_TI: np.ndarray) -> np.ndarray:
    return x_TI.astype(ml_dtypes.bfloat16).astype(np.float64)


def test_parity_and_rows_do_not_depend_on_their_number() -> None:
    w, w_OI = weight_of("bf16")
    x_TI = np.random.default_rng(1).normal(size=(T_MAX, w.inputs)).astype(np.float32)
    every = np.asarray(linear(x_TI, w))
    assert_close(every, rounded(x_TI) @ w_OI.T.astype(np.float64), 3e-6)
    for T in (0, 1, 2, 3, 5, 7, 12, 13, 31):
        np.testing.assert_array_equal(np.asarray(linear(x_TI[:T], w)), every[:T], strict=True)
    np.testing.assert_array_equal(np.asarray(linear(x_TI[-1:], w)), every[-1:])


@settings(max_examples=8, deadline=None)
@given(
    T=st.integers(0, 40),
    O=st.integers(1, 130),
    I=st.integers(1, 700),
    bias=st.booleans(),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
    seed=st.integers(0, 99),
)
def test_shapes(T: int, O: int, I: int, bias: bool, dtype: jnp.dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w, w_OI = random_weight(rng, "bf16", O, I)
    x_TI = rng.normal(size=(T, I)).astype(dtype)
    bias_O = rng.normal(size=O).astype(np.float32) if bias else np.zeros(O, np.float32)
    got = native.linear_bf16(
        jnp.asarray(x_TI), w, jnp.asarray(bias_O) if bias else None, out_dtype=jnp.float32
    )
    assert_close(got, rounded(x_TI) @ w_OI.T + bias_O, 1e-5)


@pytest.mark.parametrize("names", [("f32",), ("Q8_0",), ("bf16", "f16")])
def test_other_weights_leave_activations_as_they_are(names: tuple[str, ...]) -> None:
    rng = np.random.default_rng(4)
    w = stack([random_weight(rng, name, 33, 64)[0] for name in names])
    x_TI = jnp.asarray(rng.normal(size=(5, 64)), jnp.float32)
    np.testing.assert_array_equal(np.asarray(linear(x_TI, w)), np.asarray(jax.jit(native.linear)(x_TI, w)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_reaches_no_other_row(value: float) -> None:
    w, _ = weight_of("bf16")
    x_TI = np.random.default_rng(5).normal(size=(8, w.inputs)).astype(np.float32)
    want = np.asarray(linear(x_TI, w))
    x_TI[2, 77] = value
    got = np.asarray(linear(x_TI, w))
    assert not np.isfinite(got[2]).any()
    np.testing.assert_array_equal(np.delete(got, 2, axis=0), np.delete(want, 2, axis=0))


def test_without_the_library_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    w, _ = weight_of("bf16")
    x_TI = jnp.asarray(np.random.default_rng(7).normal(size=(3, w.inputs)), jnp.float32)
    want = native.linear_bf16(x_TI, w)
    monkeypatch.setattr(native, "available", lambda: (False, "test"))
    assert_close(native.linear_bf16(x_TI, w), want, 1e-5)


def test_plain_arrays_are_not_rounded() -> None:
    w_OI = np.random.default_rng(8).normal(size=(5, 8)).astype(ml_dtypes.bfloat16)
    x_TI = jnp.asarray(np.random.default_rng(9).normal(size=(3, 8)), jnp.float32)
    plain = jnp.asarray(w_OI)
    np.testing.assert_array_equal(
        np.asarray(native.linear_bf16(x_TI, plain)), np.asarray(native.linear(x_TI, plain))
    )
    assert (np.asarray(linear(x_TI, pack_dense(w_OI))) != np.asarray(native.linear(x_TI, plain))).any()
