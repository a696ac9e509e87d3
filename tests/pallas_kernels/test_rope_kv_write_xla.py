"""The fused rotary embedding and KV write in XLA: the contract, and what the reference computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rope_kv_write import reference, xla
from tests.pallas_kernels.compiled import optimized
from tests.pallas_kernels.rope_kv_write_cases import NORMS, PARTIAL, RopeKVWriteContract, S, Shape, inputs


class TestRopeKVWriteXla(RopeKVWriteContract):
    op = staticmethod(xla.rope_kv_write)
    compiled = staticmethod(optimized)

    def test_unknown_pool_dtype_is_refused(self) -> None:
        (*args, k, v, slot_T), options = inputs(PARTIAL, [], 0)
        assert xla.supports(*args, k, v, slot_T, **options) == (True, "")
        ok, reason = xla.supports(*args, k.astype(jnp.int32), v, slot_T, **options)
        assert not ok
        assert "int32" in reason


@pytest.mark.parametrize("shape", [PARTIAL, NORMS])
def test_reference_turns_pairs_as_complex_numbers_and_caches_them(shape: Shape) -> None:
    """The reference against float64: a pair is a complex number that is multiplied with one of magnitude 1, and each
    token is cached at its slot."""
    slots = [9, 5, 17]
    args, options = inputs(shape, slots, 3)
    got_q, *got_pools = jax.jit(reference.rope_kv_write)(*args, **options)
    qkv_TAh, cos_Ti, sin_Ti = (np.asarray(x).astype(np.float64) for x in args[:3])
    turn_T1i = (cos_Ti + 1j * sin_Ti)[:, None]
    q_THh, k_TKh, v_TKh = np.split(qkv_TAh, (shape.H, shape.H + shape.K), axis=1)
    step = 2.0 ** -jnp.finfo(shape.dtype).nmant
    want_q, want_k = (
        _turned(x, options.get(name), turn_T1i) for x, name in ((q_THh, "q_norm_h"), (k_TKh, "k_norm_h"))
    )
    # A norm is rounded before it is rotated, and the results once more.
    np.testing.assert_allclose(np.asarray(got_q).astype(np.float64), want_q, rtol=step, atol=2 * step)
    for pool_NKSh, want_TKh, name in zip(got_pools, (want_k, v_TKh), ("k_scale_K", "v_scale_K")):
        one_byte = pool_NKSh.dtype.itemsize == 1
        scale_K1 = np.asarray(options[name], np.float64)[:, None] if one_byte else np.ones((shape.K, 1))
        # Integers are rounded to half a step, and stand for 127 steps at most.
        tolerance = 0.5 + 2 * step / scale_K1.min() if one_byte else 2 * step
        for token, slot in enumerate(slots):
            cached_Kh = np.asarray(pool_NKSh[slot // S, :, slot % S]).astype(np.float64)
            exact_Kh = want_TKh[token] / scale_K1
            exact_Kh = exact_Kh.clip(-128, 127) if one_byte else exact_Kh
            np.testing.assert_allclose(cached_Kh, exact_Kh, rtol=step, atol=tolerance)


def _turned(x_TAh: np.ndarray, factor_h: jax.Array | None, turn_T1i: np.ndarray) -> np.ndarray:
    """Normed and rotated heads, in float64."""
    if factor_h is not None:
        x_TAh = x_TAh / np.sqrt((x_TAh**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(factor_h, np.float64)
    i = turn_T1i.shape[-1]
    pair_TAi = (x_TAh[..., :i] + 1j * x_TAh[..., i : 2 * i]) * turn_T1i
    return np.concatenate([pair_TAi.real, pair_TAi.imag, x_TAh[..., 2 * i :]], axis=-1)
