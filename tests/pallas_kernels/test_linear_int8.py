"""Products with quantized weights and activations of 8 bits by the native library."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pallas_kernels.linear import int8, native
from pallas_kernels.linear.formats import FORMATS
from pallas_kernels.linear.packed import PackedWeight, pack_gguf, stack
from pallas_kernels.linear.reference import linear as exact
from pallas_kernels.native.library import available
from tests.pallas_kernels.packed_cases import random_weight
from tests.pallas_kernels.test_linear_native import assert_close, weight_of

pytestmark = pytest.mark.skipif(not available()[0], reason=available()[1])

linear = jax.jit(native.linear_int8, static_argnames="out_dtype")
QUANTIZED = sorted(name for name, fmt in FORMATS.items() if not fmt.dense)
T_MAX = 70


def rounded(x_TI: NDArray[np.generic], block: int) -> NDArray[np.float32]:
    """``int8.round_blocks`` in numpy: shapes that are used once are not compiled."""
    x_TXb = x_TI.astype(np.float32).reshape(x_TI.shape[0], x_TI.shape[1] // block, block)
    top_TX1 = np.abs(x_TXb).max(-1, keepdims=True)
    return (np.round(x_TXb * (127 / top_TX1)) * (top_TX1 / 127)).reshape(x_TI.shape)


@pytest.mark.parametrize("name", QUANTIZED)
def test_parity_and_rows_do_not_depend_on_their_number(name: str) -> None:
    w, _ = weight_of(name)
    x_TI = np.random.default_rng(1).normal(size=(T_MAX, w.inputs)).astype(np.float32)
    every = np.asarray(linear(x_TI, w))
    assert_close(every, int8.linear(jnp.asarray(x_TI), w), 3e-6)
    for T in (0, 1, 2, 3, 31, 33):
        np.testing.assert_array_equal(np.asarray(linear(x_TI[:T], w)), every[:T], strict=True)
    np.testing.assert_array_equal(np.asarray(linear(x_TI[-1:], w)), every[-1:])


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_error_is_that_of_rounding(name: str) -> None:
    """Half a step in 127 of a block's largest value: for normal activations about 0.5 % of a result's size."""
    w, w_OI = weight_of(name)
    x_TI = jnp.asarray(np.random.default_rng(2).normal(size=(16, w.inputs)), jnp.float32)
    want = np.asarray(exact(x_TI, jnp.asarray(w_OI)))
    error = np.sqrt(np.mean((np.asarray(linear(x_TI, w)) - want) ** 2) / np.mean(want**2))
    assert 1e-4 < error < 0.01


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_products_do_not_overflow(name: str, sign: int) -> None:
    """All codes at their largest magnitude and all activations at 127: sums of pairs are made in 16 bits."""
    fmt = FORMATS[name]
    raw = np.full((32, 2, fmt.file_bytes), 0x80 if name == "Q8_0" else 0xFF, np.uint8)
    for at in {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}.get(name, (0,)):
        raw[..., at : at + 2] = np.frombuffer(np.float16(0.25).tobytes(), np.uint8)
    w = pack_gguf(name, raw.reshape(32, -1), (32, 2 * fmt.unit))
    x_TI = jnp.full((3, w.inputs), 0.5 * sign, jnp.float32)
    assert_close(linear(x_TI, w), int8.linear(x_TI, w), 1e-6)


@settings(max_examples=8, deadline=None)
@given(
    T=st.integers(0, 40),
    O=st.integers(1, 130),
    units=st.integers(1, 4),
    name=st.sampled_from(QUANTIZED),
    bias=st.booleans(),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
    seed=st.integers(0, 99),
)
def test_shapes(T: int, O: int, units: int, name: str, bias: bool, dtype: jnp.dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w, w_OI = random_weight(rng, name, O, units * FORMATS[name].unit)
    x_TI = rng.normal(size=(T, w.inputs)).astype(dtype)
    bias_O = rng.normal(size=O).astype(np.float32) if bias else np.zeros(O, np.float32)
    got = native.linear_int8(
        jnp.asarray(x_TI), w, jnp.asarray(bias_O) if bias else None, out_dtype=jnp.float32
    )
    assert_close(got, rounded(x_TI, FORMATS[name].block) @ w_OI.T + bias_O, 1e-5)


def test_parts_see_activations_in_blocks_of_their_own() -> None:
    rng = np.random.default_rng(3)
    w = stack([random_weight(rng, name, O, 256)[0] for name, O in (("Q4_K", 40), ("Q6_K", 9))])
    x_TI = jnp.asarray(rng.normal(size=(5, 256)), jnp.float32)
    assert_close(linear(x_TI, w), int8.linear(x_TI, w), 3e-6)


def test_a_part_that_is_not_quantized_leaves_activations_as_they_are() -> None:
    rng = np.random.default_rng(4)
    w = stack([random_weight(rng, name, 33, 64)[0] for name in ("Q8_0", "bf16")])
    x_TI = jnp.asarray(rng.normal(size=(5, 64)), jnp.float32)
    np.testing.assert_array_equal(np.asarray(linear(x_TI, w)), np.asarray(jax.jit(native.linear)(x_TI, w)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_reaches_no_other_row(value: float) -> None:
    w, _ = weight_of("Q4_1")
    x_TI = np.random.default_rng(5).normal(size=(8, w.inputs)).astype(np.float32)
    want = np.asarray(linear(x_TI, w))
    x_TI[2, 77] = value
    got = np.asarray(linear(x_TI, w))
    assert np.isnan(got[2]).all()
    np.testing.assert_array_equal(np.delete(got, 2, axis=0), np.delete(want, 2, axis=0))


def test_tiny_and_huge_blocks() -> None:
    w, _ = weight_of("Q8_0")
    x_TI = np.random.default_rng(6).normal(size=(4, w.inputs)).astype(np.float32)
    x_TI *= np.array([[1e-44], [1e-30], [1e30], [0.0]], np.float32)
    got, want = np.asarray(linear(x_TI, w)), np.asarray(int8.linear(jnp.asarray(x_TI), w))
    sizes = np.maximum(np.abs(want).max(1, keepdims=True), 1e-30)
    np.testing.assert_allclose(got / sizes, want / sizes, atol=1e-5)


def test_without_the_library_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    w, _ = weight_of("Q4_1")
    x_TI = jnp.asarray(np.random.default_rng(7).normal(size=(3, w.inputs)), jnp.float32)
    want = native.linear_int8(x_TI, w)
    monkeypatch.setattr(native, "available", lambda: (False, "test"))
    assert_close(native.linear_int8(x_TI, w), want, 1e-5)


def test_plain_arrays_are_not_rounded() -> None:
    rng = np.random.default_rng(8)
    x_TI, w_OI = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 8), (5, 8)))
    np.testing.assert_array_equal(
        np.asarray(native.linear_int8(x_TI, w_OI)), np.asarray(native.linear(x_TI, w_OI))
    )


def test_a_weight_without_blocks_of_equal_size_is_an_error() -> None:
    w, _ = weight_of("Q4_1")
    short = PackedWeight((w.data[0][:2],), w.formats, w.sizes, w.inputs)
    with pytest.raises(jax.errors.JaxRuntimeError, match="bytes"):
        jax.block_until_ready(linear(jnp.ones((2, 512)), short))
