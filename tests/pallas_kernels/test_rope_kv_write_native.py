"""The fused rotary embedding and KV write by the native library: the contract, and that pools are updated in place."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.kv_storage import storage_dtype
from pallas_kernels.native import library
from pallas_kernels.rope_kv_write import native
from tests.pallas_kernels.hlo_checks import makers
from tests.pallas_kernels.rope_kv_write_cases import PARTIAL, RopeKVWriteContract, inputs

pytestmark = pytest.mark.skipif(not library.available()[0], reason=library.available()[1])


class TestRopeKVWriteNative(RopeKVWriteContract):
    op = staticmethod(native.rope_kv_write)

    @pytest.mark.parametrize("cache_dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn])
    @pytest.mark.parametrize("T", [1, 512])
    def test_donated_pools_are_updated_in_place(self, T: int, cache_dtype: jnp.dtype) -> None:
        """Two layers' worth of writes make no array as large as a pool."""
        N, K, S, h = 997, 2, 4, 8
        pool = jax.ShapeDtypeStruct((N, K, S, h), storage_dtype(cache_dtype, "cpu"))
        qkv = jax.ShapeDtypeStruct((T, 4 + 2 * K, h), jnp.float32)
        table = jax.ShapeDtypeStruct((T, h // 2), jnp.float32)
        scale = jax.ShapeDtypeStruct((K,), jnp.float32)
        slot = jax.ShapeDtypeStruct((T,), jnp.int32)

        def layers(pools: list[jax.Array], qkv: jax.Array, *rest: jax.Array) -> list[jax.Array]:
            cos, sin, slot, scale = rest
            for i in (0, 2):
                q, *pools[i : i + 2] = native.rope_kv_write(
                    qkv, cos, sin, *pools[i : i + 2], slot, k_scale_K=scale, v_scale_K=scale
                )
                qkv = qkv.at[:, :4].add(q)
            return [qkv, *pools]

        compiled = (
            jax.jit(layers, donate_argnums=0).lower([pool] * 4, qkv, table, table, slot, scale).compile()
        )
        made = makers(compiled.as_text(), (N, N * K, N * S, N * K * S))
        assert [line for line in made if "custom-call" not in line] == []
        bytes_of_pool = N * K * S * h * pool.dtype.itemsize
        assert compiled.memory_analysis().alias_size_in_bytes == 4 * bytes_of_pool
        if T == 1:
            assert compiled.memory_analysis().temp_size_in_bytes < bytes_of_pool

    def test_what_is_refused(self) -> None:
        (qkv, cos, sin, k, v, slot_T), options = inputs(PARTIAL, [], 0)
        assert native.supports(qkv, cos, sin, k, v, slot_T, **options) == (True, "")
        for bad, name in (
            ((qkv, cos, sin, k.astype(jnp.int32), v.astype(jnp.int32), slot_T), "int32"),
            ((qkv, cos, sin, k.astype(jnp.float32), v, slot_T), "different dtypes"),
            ((qkv.astype(jnp.int32), cos, sin, k, v, slot_T), "int32"),
        ):
            ok, reason = native.supports(*bad, **options)
            assert not ok
            assert name in reason
            with pytest.raises(ValueError, match=name):
                native.rope_kv_write(*bad, **options)
