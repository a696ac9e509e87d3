"""Norms and gates by the native CPU library, against the semantics of their ops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gate import native as gate_native
from pallas_kernels.gate import reference as gate_reference
from pallas_kernels.native.library import available
from pallas_kernels.rms_norm import native as norm_native
from pallas_kernels.rms_norm import reference as norm_reference

pytestmark = pytest.mark.skipif(not available()[0], reason=available()[1])

SHAPES = [(0, 8), (1, 1), (1, 576), (3, 33), (70, 640), (5, 16)]
norm = jax.jit(norm_native.rms_norm, static_argnames="eps")
gate = jax.jit(gate_native.gate, static_argnums=1)


def rows(shape: tuple[int, int], seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 3, jnp.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_norm(shape: tuple[int, int], with_residual: bool) -> None:
    x_TD, factor_D = rows(shape, 0), rows((1, shape[1]), 1)[0]
    residual_TD = rows(shape, 2) if with_residual else None
    got, want = (f(x_TD, factor_D, residual_TD, eps=1e-5) for f in (norm, norm_reference.rms_norm))
    np.testing.assert_allclose(got[0], want[0], rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(got[1]), np.asarray(want[1]), strict=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_gate(shape: tuple[int, int], activation: str) -> None:
    gate_up_T2F = rows((shape[0], 2 * shape[1]), 3)
    want_TF = gate_reference.gate(gate_up_T2F, activation)
    # The reference's approximate gelu cancels where it is near 0.
    np.testing.assert_allclose(gate(gate_up_T2F, activation), want_TF, rtol=3e-6, atol=1e-5, strict=True)


def test_gates_far_from_zero() -> None:
    """No overflow on the way to a result that is finite."""
    gate_T1 = jnp.asarray([[-1e30], [-200.0], [-90.0], [-20.0], [0.0], [20.0], [90.0], [1e30]], jnp.float32)
    for activation in ("silu", "gelu_tanh"):
        both_T2 = jnp.concatenate([gate_T1, jnp.ones_like(gate_T1)], axis=1)
        want_T1 = gate_reference.gate(both_T2, activation)
        np.testing.assert_allclose(gate(both_T2, activation), want_T1, rtol=3e-6, atol=1e-7)


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    x_TD, factor_D = rows((90, 640), 4), rows((1, 640), 5)[0]
    alone_TD = jnp.concatenate([norm(row[None], factor_D, eps=1e-5)[0] for row in x_TD[:4]])
    broken_TD = x_TD.at[4:].set(jnp.nan)
    got_TD = norm(broken_TD, factor_D, eps=1e-5)[0]
    np.testing.assert_array_equal(got_TD[:4], alone_TD)
    assert np.isnan(got_TD[4:]).all()
    gated_TF = gate(broken_TD, "silu")
    np.testing.assert_array_equal(
        gated_TF[:4], jnp.concatenate([gate(row[None], "silu") for row in x_TD[:4]])
    )
    assert np.isnan(gated_TF[4:]).all()


def test_other_dtypes_and_a_missing_library_are_the_business_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    x_TD, factor_D = rows((3, 8), 6).astype(jnp.bfloat16), rows((1, 8), 7)[0]
    got, want = (f(x_TD, factor_D, eps=1e-5)[0] for f in (norm_native.rms_norm, norm_reference.rms_norm))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    assert gate_native.gate(x_TD, "silu").dtype == jnp.bfloat16
    monkeypatch.setattr("pallas_kernels.native.library.available", lambda: (False, "test"))
    np.testing.assert_array_equal(
        norm_native.rms_norm(rows((2, 8), 8), factor_D, eps=1e-5)[0],
        norm_reference.rms_norm(rows((2, 8), 8), factor_D, eps=1e-5)[0],
    )
