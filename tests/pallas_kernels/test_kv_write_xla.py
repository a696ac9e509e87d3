"""The KV write in XLA: the contract, and that pools are updated in place."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.kv_storage import storage_dtype, value_dtype
from pallas_kernels.kv_write import xla
from tests.pallas_kernels.hlo_checks import compiled, makers
from tests.pallas_kernels.kv_write_cases import KVWriteContract


class TestKVWriteXla(KVWriteContract):
    op = staticmethod(xla.kv_write)

    @pytest.mark.parametrize(
        "cache_dtype", [jnp.float32, jnp.float16, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn]
    )
    @pytest.mark.parametrize("T", [1, 512])
    def test_donated_pools_are_updated_in_place(self, T: int, cache_dtype: jnp.dtype) -> None:
        """The compiled program makes no second array as large as a pool, for the dtypes that a CPU cache is held in."""
        K, S, h = 2, 4, 8
        pool = jax.ShapeDtypeStruct((997, K, S, h), storage_dtype(cache_dtype, "cpu"))
        x = jax.ShapeDtypeStruct((T, K, h), jnp.float32)
        scale = jax.ShapeDtypeStruct((K,), jnp.float32)
        slot = jax.ShapeDtypeStruct((T,), jnp.int32)
        op = jax.jit(lambda *a: xla.kv_write(*a[:5], k_scale_K=a[5], v_scale_K=a[6]), donate_argnums=(0, 1))
        program = compiled(op.lower(pool, pool, x, x, slot, scale, scale))
        made = makers(program.as_text(), (997, 997 * K, 997 * S, 997 * K * S))
        assert [line for line in made if "scatter" not in line and "dynamic-update-slice" not in line] == []
        bytes_of_pool = 997 * K * S * h * pool.dtype.itemsize
        assert program.memory_analysis().temp_size_in_bytes < bytes_of_pool
        assert program.memory_analysis().alias_size_in_bytes == 2 * bytes_of_pool

    def test_storage_dtypes(self) -> None:
        assert storage_dtype(jnp.bfloat16, "cpu") == jnp.uint16
        assert storage_dtype(jnp.float8_e4m3fn, "cpu") == jnp.uint8
        assert storage_dtype(jnp.bfloat16, "gpu") == jnp.bfloat16
        assert storage_dtype(jnp.int8, "cpu") == jnp.int8
        assert value_dtype(jnp.uint16) == jnp.bfloat16
        assert value_dtype(jnp.float32) == jnp.float32

    def test_unknown_pool_dtype_is_refused(self) -> None:
        pool = jnp.zeros((2, 1, 4, 8), jnp.int32)
        x, one = jnp.zeros((1, 1, 8)), jnp.ones(1)
        ok, reason = xla.supports(pool, pool, x, x, jnp.zeros(1, jnp.int32), k_scale_K=one, v_scale_K=one)
        assert not ok
        assert "int32" in reason
