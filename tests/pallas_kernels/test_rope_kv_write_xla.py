"""The fused rotary embedding and KV write in XLA: the contract, and that it is what the separate steps give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers.norm import RMSNorm
from pallas_kernels.kv_write.xla import kv_write
from pallas_kernels.rope_kv_write import reference, xla
from tests.pallas_kernels.rope_kv_write_cases import NORMS, PARTIAL, RopeKVWriteContract, Shape, inputs


class TestRopeKVWriteXla(RopeKVWriteContract):
    op = staticmethod(xla.rope_kv_write)

    def test_unknown_pool_dtype_is_refused(self) -> None:
        (*args, k, v, slot_T), options = inputs(PARTIAL, [], 0)
        assert xla.supports(*args, k, v, slot_T, **options) == (True, "")
        ok, reason = xla.supports(*args, k.astype(jnp.int32), v, slot_T, **options)
        assert not ok
        assert "int32" in reason


@pytest.mark.parametrize("shape", [PARTIAL, NORMS])
def test_reference_equals_the_layers_of_a_model(shape: Shape) -> None:
    """The op's semantics are those of the engine's norm and rope followed by the KV write, bit for bit."""
    args, options = inputs(shape, [9, 5, 17], 3)

    def layers(
        qkv_TAh: jax.Array,
        cos_Ti: jax.Array,
        sin_Ti: jax.Array,
        k: jax.Array,
        v: jax.Array,
        slot_T: jax.Array,
    ) -> tuple[jax.Array, ...]:
        q_THh, k_TKh, v_TKh = jnp.split(qkv_TAh, (shape.H, shape.H + shape.K), axis=1)
        if shape.norms:
            q_THh, k_TKh = (
                _norm(shape.h, options[name])(x) for name, x in (("q_norm_h", q_THh), ("k_norm_h", k_TKh))
            )
        q_THh, k_TKh = (reference.rotate(x, cos_Ti, sin_Ti) for x in (q_THh, k_TKh))
        scales = {name: options[name] for name in ("k_scale_K", "v_scale_K")}
        return q_THh, *kv_write(k, v, k_TKh, v_TKh, slot_T, **scales)

    for a, b in zip(jax.jit(reference.rope_kv_write)(*args, **options), jax.jit(layers)(*args)):
        if shape.norms:
            np.testing.assert_allclose(
                np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-2, atol=1
            )
        else:
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def _norm(h: int, factor_h: jax.Array) -> RMSNorm:
    norm = RMSNorm(h, 1e-6, 0.0, None)
    norm.weight[...] = factor_h
    return norm
