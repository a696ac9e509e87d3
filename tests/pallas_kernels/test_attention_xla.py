"""Ragged paged attention in XLA: the contract, and what only this backend promises."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import xla
from tests.pallas_kernels.attention_cases import AttentionContract, Case, inputs, run


class TestAttentionXla(AttentionContract):
    op = staticmethod(xla.ragged_paged_attention)

    @pytest.mark.parametrize("kv_dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
    @pytest.mark.parametrize("rows", [((1, 150),), ((7, 150),)])
    def test_rows_do_not_depend_on_neighbours(
        self, rows: tuple[tuple[int, int], ...], kv_dtype: jnp.dtype
    ) -> None:
        """A row's result is the same bits with other neighbours and in another place of the same bucket."""
        others = ((1, 300), (20, 60), (1, 4))
        case = Case((*rows, *others), R=8, T=64, M=80, kv_dtype=kv_dtype)
        args, options = inputs(case)
        q, k, v, table, start_Q, context_R = args
        n = rows[0][0]
        want = run(self.op, args, options)[:n]
        alone = (
            q,
            k,
            v,
            table,
            jnp.asarray([0] + [n] * 8, jnp.int32),
            jnp.asarray([rows[0][1]] + [0] * 7, jnp.int32),
        )
        np.testing.assert_array_equal(run(self.op, alone, options)[:n], want)
        moved = (
            jnp.roll(q, 3, axis=0),
            k,
            v,
            table[jnp.asarray([1, 0, 2, 3, 4, 5, 6, 7])],
            jnp.asarray([0, 3] + [3 + n] * 7, jnp.int32),
            jnp.asarray([8, rows[0][1]] + [0] * 6, jnp.int32),
        )
        np.testing.assert_array_equal(run(self.op, moved, options)[3 : 3 + n], want)

    @pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn])
    @pytest.mark.parametrize("T", [4, 64])
    def test_pool_is_neither_copied_nor_converted(self, kv_dtype: jnp.dtype, T: int) -> None:
        """No instruction of the compiled program makes another array as large as the pool."""
        args, options = inputs(Case(((1, 20), (3, 20)), R=4, T=T, kv_dtype=kv_dtype))
        q, k, v, *rest = args
        N = 997
        pool = jax.ShapeDtypeStruct((N, *k.shape[1:]), kv_dtype)
        arrays = {"k_scale_K": options["k_scale_K"], "v_scale_K": options["v_scale_K"]}
        op = jax.jit(lambda q, k, v, t, s, c, a: self.op(q, k, v, t, s, c, scale=0.4, **a))
        text = op.lower(q, pool, pool, *rest, arrays).compile().as_text()
        assert whole_pool_instructions(text, N * k.shape[1]) == []


def whole_pool_instructions(hlo: str, rows: int) -> list[str]:
    """Instructions that produce an array with a pool's leading size other than by renaming an existing one."""
    found = []
    size = re.compile(rf"= \w+\[({rows}|997),[\d,]*\]\S* ([\w-]+)\(")
    for line in hlo.splitlines():
        match = size.search(line)
        if match and match.group(2) not in ("parameter", "bitcast", "get-tuple-element", "bitcast-convert"):
            found.append(line.strip())
    return found
