"""Ragged paged attention in XLA: the contract, and what only this backend promises."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import xla
from tests.pallas_kernels.attention_cases import AttentionContract, run
from tests.pallas_kernels.attention_inputs import KV_DTYPES, Shape, inputs, solo
from tests.pallas_kernels.hlo_checks import compiled, makers

bits = partial(run, optimize=True)


class TestAttentionXla(AttentionContract):
    op = staticmethod(xla.ragged_paged_attention)

    @pytest.mark.parametrize("kv_dtype", [jnp.float32, jnp.bfloat16])
    @pytest.mark.parametrize("tokens", [1, 7])
    def test_rows_do_not_depend_on_neighbours(self, tokens: int, kv_dtype: jnp.dtype) -> None:
        """A row's result is the same bits without its neighbours and in another place of the batch."""
        shape = Shape(R=8, T=64, M=80, N=200, kv_dtype=kv_dtype)
        args, options = inputs(shape, ((tokens, 150), (1, 300), (20, 60), (1, 4)))
        want = bits(self.op, shape, args, options)[:tokens]
        q, k, v, table, start_Q, context_R = alone = solo(args, 0)
        np.testing.assert_array_equal(bits(self.op, shape, alone, options)[:tokens], want)
        moved = (
            jnp.roll(q, 3, axis=0),
            k,
            v,
            jnp.roll(table, 1, axis=0),
            jnp.concatenate([jnp.zeros(1, jnp.int32), 3 + start_Q[:-1]]),
            jnp.roll(context_R, 1).at[0].set(8),
        )
        np.testing.assert_array_equal(bits(self.op, shape, moved, options)[3 : 3 + tokens], want)

    @pytest.mark.parametrize("R", [8, 32])
    def test_decode_does_not_depend_on_the_bucket(self, R: int) -> None:
        """A decode gives the same bits in a decode step of R rows as in a mixed step, from one full group of rows on
        (with fewer rows XLA may sum in another order: differences of the last bit)."""
        rows = ((1, 150),)
        mixed = Shape(R=8, T=64, M=80, N=200)
        args, options = inputs(mixed, (*rows, (20, 60)))
        want = bits(self.op, mixed, args, options)[0]
        q, k, v, table, _, _ = args
        table = jnp.tile(table[:1], (R, 1))
        start, context = jnp.asarray([0] + [1] * R, jnp.int32), jnp.asarray([150] + [0] * (R - 1), jnp.int32)
        q = jnp.concatenate([q[:1], jnp.ones((R - 1, *q.shape[1:]))])
        np.testing.assert_array_equal(
            bits(self.op, mixed, (q, k, v, table, start, context), options)[0], want
        )

    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    def test_pool_is_neither_copied_nor_converted(self, kv_dtype: jnp.dtype) -> None:
        """No instruction of the compiled program makes another array as large as the pool."""
        shape = Shape(R=4, T=16, N=997, kv_dtype=kv_dtype)
        args, options = inputs(shape, ((1, 20), (3, 20)))
        op = jax.jit(lambda args, options: self.op(*args, scale=0.4, **options))
        text = compiled(op.lower(args, options)).as_text()
        assert makers(text, (shape.N, shape.N * shape.K, shape.N * shape.K * 4)) == []

    def test_unknown_pool_dtype_is_refused(self) -> None:
        shape = Shape(R=1, T=1)
        (q, k, v, *rest), _ = inputs(shape, ((1, 1),))
        assert xla.supports(q, k, v, *rest, scale=1.0) == (True, "")
        ok, reason = xla.supports(q, k.astype(jnp.int32), v, *rest, scale=1.0)
        assert not ok
        assert "int32" in reason
