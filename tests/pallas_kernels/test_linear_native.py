"""Products with packed weights by the native library."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pallas_kernels.linear import native
from pallas_kernels.linear.formats import FORMATS
from pallas_kernels.linear.packed import PackedWeight, pack_dense, stack
from pallas_kernels.linear.reference import linear as reference
from pallas_kernels.native.library import available
from tests.pallas_kernels.matmul_cases import LinearContract
from tests.pallas_kernels.packed_cases import DENSE, random_weight

pytestmark = pytest.mark.skipif(not available()[0], reason=available()[1])

linear = jax.jit(native.linear, static_argnames="out_dtype")
rows = jax.jit(native.rows, static_argnames="dtype")
HALF_PRECISION = {jnp.float32: 3e-6, jnp.bfloat16: 1e-2, jnp.float16: 1e-3}
T_MAX = 257


@functools.cache
def weight_of(name: str) -> tuple[PackedWeight, NDArray[np.float32]]:
    """75 outputs: three tiles, the last one not full; dense inputs do not fill a unit."""
    return random_weight(np.random.default_rng(0), name, 75, 333 if name in DENSE else 512)


def assert_close(got: jax.Array, want: jax.Array, tolerance: float) -> None:
    """Errors are relative to the size of a whole row: sums cancel."""
    got_TO, want_TO = (np.asarray(y, np.float64) for y in (got, want))
    assert got_TO.shape == want_TO.shape
    scale = np.sqrt(np.mean(want_TO**2)) if want_TO.size else 1.0
    np.testing.assert_allclose(got_TO / scale, want_TO / scale, rtol=tolerance, atol=tolerance)


class TestPlainArrays(LinearContract):
    """Arrays that are not packed are XLA's."""

    op = staticmethod(native.linear)


class TestPackedContract(LinearContract):
    """The contract of every backend; packing is part of the operation that is tested."""

    @staticmethod
    def op(
        x_TI: jax.Array, w_OI: jax.Array, bias_O: jax.Array | None = None, **options: jnp.dtype
    ) -> jax.Array:
        shape = jax.ShapeDtypeStruct(
            (1, FORMATS["f32"].unit_bytes * FORMATS["f32"].units(w_OI.shape[1])), jnp.uint8
        )

        def packed(w: NDArray[np.generic]) -> NDArray[np.uint8]:
            return np.asarray(pack_dense(np.asarray(w)).data[0])

        name = {np.dtype(v): k for k, v in DENSE.items()}[np.dtype(w_OI.dtype)]
        fmt = FORMATS[name]
        tiles = -(-w_OI.shape[0] // 32)
        shape = jax.ShapeDtypeStruct((tiles, fmt.unit_bytes * fmt.units(w_OI.shape[1])), jnp.uint8)
        data = jax.pure_callback(packed, shape, w_OI)
        weight = PackedWeight((data,), (name,), (w_OI.shape[0],), w_OI.shape[1])
        return native.linear(x_TI, weight, bias_O, **options)


@pytest.mark.parametrize("name", FORMATS)
def test_parity_and_rows_do_not_depend_on_their_number(name: str) -> None:
    """Every T gives the oracle's numbers, and every row the same bits in every T."""
    w, w_OI = weight_of(name)
    x_TI = np.random.default_rng(1).normal(size=(T_MAX, w.inputs)).astype(np.float32)
    want_TO = reference(jnp.asarray(x_TI), jnp.asarray(w_OI))
    every = np.asarray(linear(x_TI, w))
    assert_close(every, want_TO, 3e-6)
    for T in (0, 1, 2, 3, 7, 8, 16, 17, 64):
        np.testing.assert_array_equal(np.asarray(linear(x_TI[:T], w)), every[:T], strict=True)
    np.testing.assert_array_equal(np.asarray(linear(x_TI[-1:], w)), every[-1:])


@pytest.mark.parametrize("name", ["bf16", "Q4_1", "Q6_K"])
@pytest.mark.parametrize(
    "dtypes", [(jnp.bfloat16, jnp.float32), (jnp.float16, jnp.bfloat16), (jnp.float32, jnp.float16)]
)
def test_dtypes_and_bias(name: str, dtypes: tuple[jnp.dtype, jnp.dtype]) -> None:
    w, w_OI = weight_of(name)
    rng = np.random.default_rng(2)
    x_TI, bias_O = (
        jnp.asarray(rng.normal(size=(7, w.inputs)), dtypes[0]),
        jnp.asarray(rng.normal(size=75), dtypes[0]),
    )
    got = linear(x_TI, w, bias_O, out_dtype=dtypes[1])
    assert got.dtype == dtypes[1]
    want = reference(x_TI, jnp.asarray(w_OI), bias_O, out_dtype=jnp.float32)
    assert_close(got, want, HALF_PRECISION[dtypes[1]])
    assert native.linear(x_TI, w).dtype == dtypes[0]


def test_results_are_rounded_as_xla_rounds() -> None:
    """Ties, subnormal, huge, infinite and NaN results in 16 bits: a product with the identity rounds its input."""
    w = pack_dense(np.eye(32, dtype=np.float32))
    bits = np.random.default_rng(0).integers(0, 1 << 32, (400, 32), dtype=np.uint32)
    bits[:100] = bits[:100] & 0xFFFF0000 | 0x8000
    x_TI = bits.view(np.float32)
    # One number per row, since 0 * inf is NaN.
    x_TI = np.where(np.arange(32) == np.arange(400)[:, None] % 32, x_TI, np.float32(0))
    exact_TO = np.asarray(linear(x_TI, w, out_dtype=jnp.float32))
    for dtype in (jnp.bfloat16, jnp.float16):
        got, want = np.asarray(linear(x_TI, w, out_dtype=dtype)), jnp.asarray(exact_TO).astype(dtype)
        np.testing.assert_array_equal(got.astype(np.float32), np.asarray(want, np.float32))


@settings(max_examples=12, deadline=None)
@given(
    T=st.integers(0, 20),
    O=st.integers(1, 130),
    I=st.integers(1, 200),
    name=st.sampled_from(sorted(FORMATS)),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_shapes(T: int, O: int, I: int, name: str, bias: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    unit = 1 if name in DENSE else FORMATS[name].unit
    w, w_OI = random_weight(rng, name, O, I if unit == 1 else -(-I // unit) * unit)
    x_TI = jnp.asarray(rng.normal(size=(T, w.inputs)), jnp.float32)
    bias_O = jnp.asarray(rng.normal(size=O), jnp.float32) if bias else None
    assert_close(native.linear(x_TI, w, bias_O), reference(x_TI, jnp.asarray(w_OI), bias_O), 1e-5)


def test_parts_of_several_formats() -> None:
    """As merged q, k and v of a Q4_K_M file; each part has the bits that it has alone."""
    rng = np.random.default_rng(3)
    named = [
        random_weight(rng, name, O, 256)
        for name, O in (("Q4_K", 70), ("Q6_K", 40), ("Q4_K", 9), ("bf16", 33))
    ]
    w = stack([part for part, _ in named])
    x_TI, bias_O = (
        jnp.asarray(rng.normal(size=(9, 256)), jnp.float32),
        jnp.arange(w.shape[0], dtype=jnp.float32),
    )
    got_TO = linear(x_TI, w, bias_O)
    first = 0
    for part, w_OI in named:
        last = first + w_OI.shape[0]
        alone = linear(x_TI, part, bias_O[first:last])
        np.testing.assert_array_equal(np.asarray(got_TO[:, first:last]), np.asarray(alone))
        assert_close(alone, reference(x_TI, jnp.asarray(w_OI), bias_O[first:last]), 3e-6)
        first = last


def test_neighbours_that_are_not_finite_reach_nothing() -> None:
    w, _ = weight_of("Q4_1")
    x_TI = np.random.default_rng(4).normal(size=(8, w.inputs)).astype(np.float32)
    want = np.asarray(linear(x_TI, w))[3]
    x_TI[np.arange(8) != 3] = np.nan
    got = np.asarray(linear(x_TI, w))
    np.testing.assert_array_equal(got[3], want)
    assert np.isnan(np.delete(got, 3, axis=0)).all()


def test_inside_scan_and_with_donated_inputs() -> None:
    w, w_OI = random_weight(np.random.default_rng(5), "Q8_0", 64, 64)

    @functools.partial(jax.jit, donate_argnums=0)
    def apply(x_TI: jax.Array, w: PackedWeight) -> jax.Array:
        return jax.lax.scan(lambda x, _: (native.linear(x, w) / 4, None), x_TI, None, length=3)[0]

    want = x = np.random.default_rng(6).normal(size=(5, 64)).astype(np.float32)
    for _ in range(3):
        want = want @ w_OI.T / 4
    assert_close(apply(jnp.asarray(x), w), want, 1e-5)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_of_embeddings(name: str, dtype: jnp.dtype) -> None:
    w, w_OI = weight_of(name)
    ids = np.array([0, 74, 31, 32, 5, 5, 64] * 4 + [-3, 99])
    got = rows(w, jnp.asarray(ids), dtype=dtype)
    want = jnp.asarray(w_OI[np.clip(ids, 0, 74)]).astype(dtype)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32), strict=True)


def test_rows_of_several_parts() -> None:
    parts = [
        random_weight(np.random.default_rng(i), name, 40, 256)
        for i, name in enumerate(("Q4_K", "f16", "Q6_K"))
    ]
    ids = np.arange(120)[::-1].copy()
    got = rows(stack([w for w, _ in parts]), jnp.asarray(ids), dtype=jnp.float32)
    np.testing.assert_array_equal(np.asarray(got), np.concatenate([w_OI for _, w_OI in parts])[ids])


def test_what_is_not_served_is_refused() -> None:
    w, _ = weight_of("Q4_1")
    with pytest.raises(ValueError, match=r"linear: x is \(2, 9\), the weight \(75, 512\)"):
        native.linear(jnp.ones((2, 9)), w)
    with pytest.raises(ValueError, match="int32 is not float32"):
        native.linear(jnp.ones((2, 512), jnp.int32), w)
    short = PackedWeight((w.data[0][:2],), w.formats, w.sizes, w.inputs)
    with pytest.raises(jax.errors.JaxRuntimeError, match="bytes"):
        jax.block_until_ready(linear(jnp.ones((2, 512)), short))


def test_without_the_library_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: (False, "test"))
    w, w_OI = weight_of("Q4_1")
    x_TI = jnp.asarray(np.random.default_rng(7).normal(size=(3, w.inputs)), jnp.float32)
    assert_close(native.linear(x_TI, w), reference(x_TI, jnp.asarray(w_OI)), 1e-5)
    np.testing.assert_array_equal(np.asarray(native.rows(w, jnp.array([74, 0]), jnp.float32)), w_OI[[74, 0]])


DIGEST = """
import os, sys
os.sched_setaffinity(0, set(list(os.sched_getaffinity(0))[: int(sys.argv[1])]))
import hashlib, jax, numpy as np
from pallas_kernels.linear import native
from tests.pallas_kernels.packed_cases import random_weight
digest = hashlib.sha256()
for name in ("Q4_1", "Q6_K", "bf16"):
    w, _ = random_weight(np.random.default_rng(0), name, 500, 512)
    x = np.random.default_rng(1).normal(size=(300, 512)).astype(np.float32)
    for linear in (native.linear, native.linear_int8, native.linear_bf16):
        for rows in (8, 300):
            digest.update(np.asarray(jax.jit(linear)(x[:rows], w)).tobytes())
print(digest.hexdigest())
"""


def test_numbers_do_not_depend_on_threads_and_instructions() -> None:
    """XLA's pool has a thread per processor that the process may use. Level 3 is AVX2, on any processor."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST, threads],
            env={**environment, "JAXINFER_CPU_LEVEL": level},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for threads, level in (("1", "4"), ("2", "4"), ("2", "3"))
    }
    assert len(digests) == 1
