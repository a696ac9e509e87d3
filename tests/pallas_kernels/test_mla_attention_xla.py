"""The latent attention in XLA: the contract, and what only this backend promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import xla as kv_write
from pallas_kernels.mla_attention import xla
from tests.pallas_kernels.hlo_checks import compiled, makers
from tests.pallas_kernels.mla_attention_cases import MlaAttentionContract, Shape, inputs, run


class TestMlaAttentionXla(MlaAttentionContract):
    op = staticmethod(xla.mla_attention)

    @pytest.mark.parametrize("kv_dtype", [jnp.float32, jnp.uint16])
    def test_pools_are_neither_copied_nor_converted(self, kv_dtype: jnp.dtype) -> None:
        """No instruction of the compiled program makes another array as large as a pool."""
        shape = Shape(M=12, N=997, kv_dtype=kv_dtype)
        args, options = inputs(shape, ((1, 20), (3, 20)))
        op = jax.jit(lambda args, options: self.op(*args, scale=0.4, **options))
        text = compiled(op.lower(args, options)).as_text()
        assert makers(text, (997, 997 * 4)) == []

    def test_refusals_say_why(self) -> None:
        (q_latent, q_rope, latent, rope, *rest), _ = inputs(Shape(), ((1, 1),))
        assert xla.supports(q_latent, q_rope, latent, rope, *rest, scale=1.0) == (True, "")
        for wrong, word in (
            (latent.astype(jnp.int32), "int32"),
            (latent.reshape(750, 2, 4, 16), "[N, 1, S, r]"),
        ):
            ok, reason = xla.supports(q_latent, q_rope, wrong, rope, *rest, scale=1.0)
            assert not ok
            assert word in reason


def test_absorbed_attention_equals_attention_on_expanded_keys_and_values() -> None:
    """The whole of the method: with the up-projections of keys and values absorbed, the latent cache (written by
    ``kv_write``, K = 1) gives what attention over full keys and values gives."""
    rng = np.random.default_rng(0)
    H, r, d, nope, v_width, C = 3, 16, 8, 12, 10, 7
    latent_Cr, rope_Cd = rng.normal(size=(C, r)), rng.normal(size=(C, d))
    up_k_Hrn, up_v_Hrv = rng.normal(size=(H, r, nope)) / 4, rng.normal(size=(H, r, v_width)) / 4
    q_nope_Hn, q_rope_Hd = rng.normal(size=(H, nope)), rng.normal(size=(H, d))
    scale = (nope + d) ** -0.5
    s_HC = np.einsum("hn,hrn,cr->hc", q_nope_Hn, up_k_Hrn, latent_Cr) + q_rope_Hd @ rope_Cd.T
    p_HC = np.exp(s_HC * scale)
    p_HC /= p_HC.sum(1, keepdims=True)
    want_Hv = np.einsum("hc,cr,hrv->hv", p_HC, latent_Cr, up_v_Hrv)

    pools = (jnp.zeros((3, 1, 4, r)), jnp.zeros((3, 1, 4, d)))
    x = (jnp.asarray(latent_Cr[:, None], jnp.float32), jnp.asarray(rope_Cd[:, None], jnp.float32))
    one = jnp.ones(1)
    pools = jax.jit(kv_write.kv_write)(*pools, *x, 4 + jnp.arange(C), k_scale_K=one, v_scale_K=one)
    q_latent_1Hr = jnp.asarray(np.einsum("hn,hrn->hr", q_nope_Hn, up_k_Hrn)[None], jnp.float32)
    batch = (jnp.asarray([[1, 2]]), jnp.asarray([0, 1]), jnp.asarray([C]))
    op = jax.jit(functools.partial(xla.mla_attention, scale=scale))
    out_1Hr = op(q_latent_1Hr, jnp.asarray(q_rope_Hd[None], jnp.float32), *pools, *batch)
    got_Hv = np.einsum("hr,hrv->hv", np.asarray(out_1Hr)[0], up_v_Hrv)
    np.testing.assert_allclose(got_Hv, want_Hv, rtol=1e-5, atol=1e-5)


def test_rows_do_not_depend_on_their_place() -> None:
    args, options = inputs(Shape(), ((2, 150), (1, 300), (5, 60), (1, 4)))
    want = run(xla.mla_attention, args, options, bits=True)[:2]
    q_latent, q_rope, latent, rope, table, start_Q, context_R = args
    moved = (
        *(jnp.roll(q, 3, axis=0) for q in (q_latent, q_rope)),
        latent,
        rope,
        jnp.roll(table, 1, axis=0),
        jnp.concatenate([jnp.zeros(1, jnp.int32), 3 + start_Q[:-1]]),
        jnp.roll(context_R, 1).at[0].set(8),
    )
    np.testing.assert_array_equal(run(xla.mla_attention, moved, options, bits=True)[3:5], want)
