"""The fused rotary embedding and KV write in Pallas-Triton: the contract in interpret mode, and its own promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpus import Generation
from pallas_kernels.rope_kv_write import cases, triton, tuning
from tests.pallas_kernels.compiled import jitted
from tests.pallas_kernels.rope_kv_write_cases import PARTIAL, RopeKVWriteContract, inputs


class TestRopeKVWriteTriton(RopeKVWriteContract):
    op = staticmethod(functools.partial(triton.rope_kv_write, interpret=True))
    typed_pools_only = True

    @pytest.mark.parametrize("rows", [1, 64])
    def test_tile_sizes_make_no_difference(self, rows: int) -> None:
        args, options = inputs(PARTIAL, [9, 8, 30], 5)
        want_q, *want_pools = jitted(self.op)(*args, **options)
        op = functools.partial(self.op, choice=tuning.Choice(rows=rows, num_warps=1))
        got_q, *got_pools = jitted(op)(*args, **options)
        np.testing.assert_array_equal(np.asarray(got_q, np.float32), np.asarray(want_q, np.float32))
        for a, b in zip(got_pools, want_pools):
            np.testing.assert_array_equal(np.asarray(a, np.float32)[1:], np.asarray(b, np.float32)[1:])


@pytest.mark.parametrize(
    ("dtype", "pairs", "blocks", "generation", "word"),
    [
        (jnp.bfloat16, 64, 4, "ampere", ""),
        (jnp.bfloat16, 65, 4, "hopper", "65 rotated pairs"),
        (jnp.uint8, 64, 4, "hopper", "typed pools"),
        (jnp.float8_e4m3fn, 64, 4, "ampere", "Ampere"),
        (jnp.float8_e4m3fn, 64, 3 << 14, "hopper", "32-bit"),
    ],
)
def test_supports(dtype: jnp.dtype, pairs: int, blocks: int, generation: Generation, word: str) -> None:
    pool = jax.ShapeDtypeStruct((blocks, 8, 64, 128), dtype)
    qkv = jax.ShapeDtypeStruct((4, 48, 128), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((4, pairs), jnp.float32)
    slot, one = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.float32)
    ok, reason = triton.supports(
        qkv, table, table, pool, pool, slot, k_scale_K=one, v_scale_K=one, generation=generation
    )
    assert ok == (word == "")
    assert word in reason


def test_cases_have_names_of_their_own() -> None:
    assert len({case.name for case in cases.kernel_cases()}) == len(cases.SHAPES)
