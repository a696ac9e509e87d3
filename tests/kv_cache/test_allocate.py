"""How memory becomes blocks."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kv_cache.allocate import addressable_blocks, allocate, bytes_per_block, split_memory
from jaxinfer.kv_cache.layout import LayerKVSpec, group_layers

SPECS = (LayerKVSpec(2, 8, None), LayerKVSpec(2, 8, 32), LayerKVSpec(2, 8, 32))


def test_layers_with_the_same_window_share_a_group():
    assert group_layers(SPECS) == ((None, 32), (0, 1, 1))


def test_bytes_count_k_and_v_of_every_layer_of_a_group():
    assert bytes_per_block(SPECS, (0, 1, 1), 4, jnp.dtype(jnp.float32)) == (
        2 * 2 * 4 * 8 * 4,
        2 * 2 * 2 * 4 * 8 * 4,
    )


def test_pools_have_the_layout_blocks_heads_slots_width_and_scales_per_head():
    cache = allocate(
        SPECS, (0, 1, 1), (5, 3), 4, jnp.dtype(jnp.int8), {1: (np.float32([2]), np.float32([3, 4]))}
    )
    assert [kv.k_NKSh.shape for kv in cache] == [(5, 2, 4, 8), (3, 2, 4, 8), (3, 2, 4, 8)]
    np.testing.assert_array_equal(cache[1].k_scale_K, [2, 2])
    np.testing.assert_array_equal(cache[1].v_scale_K, [3, 4])
    np.testing.assert_array_equal(cache[0].v_scale_K, [1, 1])


def _split(memory: int) -> tuple[int, ...]:
    return split_memory(memory, (512, 1024), (None, 32), 4, max_num_seqs=4, max_model_len=128, chunk=16)


def test_a_windowed_group_gets_no_more_than_it_can_use():
    full, windowed = _split(1 << 30)
    assert full == 2 * 32 * 4 + 1
    assert windowed == 2 * (16 + 1) * 4 + 1


def test_memory_is_used_up_but_not_exceeded():
    blocks = _split(100_000)
    assert 90_000 < sum(n * b for n, b in zip(blocks, (512, 1024))) <= 100_000


def test_too_little_memory_names_what_is_needed():
    with pytest.raises(ValueError, match=r"one sequence of 128 tokens needs \d+"):
        _split(1000)


@pytest.mark.parametrize(("dtype", "fitting"), [(jnp.int8, 1 << 17), (jnp.bfloat16, 150_000)])
def test_one_byte_pools_stay_below_the_offsets_that_overflow(dtype, fitting):
    specs = (LayerKVSpec(8, 128, None), LayerKVSpec(8, 128, 32))
    assert addressable_blocks((150_000, 100), specs, (0, 1), 16, jnp.dtype(dtype)) == (fitting, 100)
    assert addressable_blocks((300_000, 100), specs, (0, 1), 16, jnp.dtype(jnp.int8)) == (300_000, 100)
