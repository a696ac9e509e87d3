"""Runs ops over two devices; a program of its own, because the number of devices is fixed when JAX starts."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.ragged_paged_attention import xla as attention_xla
from pallas_kernels.rope_kv_write import xla as rope_kv_write_xla
from sharding.kernels import attention_over_heads, rope_kv_write_over_heads

H, K, h, T, N, S = 8, 4, 16, 6, 5, 4
AXIS = "tensor"


def by_device(qkv_TAh: jax.Array) -> jax.Array:
    """Reorders heads from "all queries, keys, values" to the halves of each device after one another."""
    q, k, v = jnp.split(qkv_TAh, (H, H + K), axis=1)
    halves = [jnp.split(part, 2, axis=1) for part in (q, k, v)]
    return jnp.concatenate([half[device] for device in (0, 1) for half in halves], axis=1)


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    qkv_TAh = jax.random.normal(keys[0], (T, H + 2 * K, h))
    k_NKSh, v_NKSh = (jax.random.normal(key, (N, K, S, h)) for key in keys[1:3])
    angle_Ti = jax.random.normal(keys[3], (T, h // 2))
    cos_Ti, sin_Ti = jnp.cos(angle_Ti), jnp.sin(angle_Ti)
    slot_T = jnp.arange(S, S + T, dtype=jnp.int32)
    scales = {"k_scale_K": jnp.linspace(1.0, 2.0, K), "v_scale_K": jnp.linspace(2.0, 3.0, K)}
    table_RM = jnp.array([[1, 2]], jnp.int32)
    start_Q, context_R = jnp.array([0, T], jnp.int32), jnp.array([T], jnp.int32)
    sinks_H = jnp.linspace(-1.0, 1.0, H)

    def step(write, attend, qkv_TAh):  # type: ignore[no-untyped-def]
        q, k, v = write(qkv_TAh, cos_Ti, sin_Ti, k_NKSh, v_NKSh, slot_T, **scales, q_norm_h=None)
        return attend(q, k, v, table_RM, start_Q, context_R, scale=0.25, window=None, sinks_H=sinks_H), k, v

    write, attend = rope_kv_write_xla.rope_kv_write, attention_xla.ragged_paged_attention
    expected = jax.jit(lambda x: step(write, attend, x))(qkv_TAh)
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    with jax.set_mesh(mesh):
        x = jax.device_put(by_device(qkv_TAh), NamedSharding(mesh, PartitionSpec(None, AXIS)))
        sharded = (rope_kv_write_over_heads(write, AXIS), attention_over_heads(attend, AXIS))
        found = jax.jit(lambda x: step(*sharded, x))(x)
    for name, a, b in zip(("attention", "K", "V"), expected, found, strict=True):
        assert len(b.addressable_shards) == 2
        assert b.addressable_shards[0].data.shape[1] * 2 == b.shape[1], name
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6, atol=1e-6, err_msg=name)
    assert hash(sharded[1]) == hash(attention_over_heads(attend, AXIS))


if __name__ == "__main__":
    main()
