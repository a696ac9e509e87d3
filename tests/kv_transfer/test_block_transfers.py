"""The device programs that read and write blocks: any numbers of blocks and devices, whole heads in between."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kv_cache.allocate import allocate
from jaxinfer.kv_cache.layout import LayerKVSpec
from jaxinfer.runner.block_transfers import BlockTransfers, pieces, replaced
from jaxinfer.scheduler.plan import BlockRead
from sharding.layout import ONE_DEVICE, Layout
from sharding.mesh import make_layout

pytestmark = pytest.mark.feature("disaggregation")

SPECS = (LayerKVSpec(2, 4, None), LayerKVSpec(2, 4, 8), LayerKVSpec(2, 4, None, second_dim=6))
GROUPS = (0, 1, 0)
N, S = 12, 2


def make(layout: Layout):
    cache = allocate(SPECS, GROUPS, (N, N), S, jnp.dtype(jnp.float32), {}, layout)
    return cache, BlockTransfers.make(GROUPS, tuple(spec.num_kv_heads for spec in SPECS), layout)


def content(layer: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(layer)
    spec = SPECS[layer]
    first, second = ((count, spec.num_kv_heads, S, width) for width in spec.widths)
    return rng.standard_normal(first).astype(np.float32), rng.standard_normal(second).astype(np.float32)


def test_any_number_of_blocks_is_cut_without_padding() -> None:
    for count in range(70):
        blocks = list(range(100, 100 + count))
        cut = pieces(blocks)
        assert [block for _, ids_C in cut for block in ids_C.tolist()] == blocks
        assert [start for start, _ in cut] == np.cumsum([0, *(len(ids) for _, ids in cut)]).tolist()[:-1]


@pytest.mark.parametrize(
    ("devices", "others"),
    [(1, 4), pytest.param(1, 1, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_what_was_written_is_read_on_any_number_of_devices(devices, others) -> None:
    def layout(count: int) -> Layout:
        return ONE_DEVICE if count == 1 else make_layout(jax.devices(), count, 1)

    blocks = (3, 9, 4)
    wrote = {0: content(0, 3), 2: content(2, 3)}
    cache, transfers = make(layout(devices))
    other, other_transfers = make(layout(others))
    flat = tuple(x for layer in (0, 2) for x in wrote[layer])
    part = transfers.put((cache[0], cache[2]), (0, 2), blocks, flat)
    cache = replaced(cache, (0, 2), part)

    found: list[tuple[tuple[int, ...], int, tuple[jax.Array, ...]]] = []
    read = BlockRead(0, blocks, lambda *piece: found.append(piece))
    transfers.take(read, 0, cache)
    # Pieces of two blocks and of one; they go on to an engine with other devices.
    assert [(layers, start) for layers, start, _ in found] == [((0, 2), 0), ((0, 2), 2)]
    for layers, start, contents in found:
        ids = (7, 8, 2)[start : start + len(contents[0])]
        host = tuple(np.asarray(x) for x in contents)
        moved = other_transfers.put(tuple(other[layer] for layer in layers), layers, ids, host)
        other = replaced(other, layers, moved)
    found.clear()
    other_transfers.take(BlockRead(0, (7, 8, 2), lambda *piece: found.append(piece)), 0, other)
    for i, expected in enumerate(flat):
        got = np.concatenate([np.asarray(contents[i]) for _, _, contents in found])
        np.testing.assert_array_equal(got, expected)
    # Nothing else was touched.
    assert not np.asarray(other[1].k_NKSh).any()
    untouched = [block for block in range(N) if block not in (7, 8, 2)]
    assert not np.asarray(other[0].k_NKSh)[untouched].any()


def test_warm_ups_run_every_program_and_leave_the_cache_as_it_was() -> None:
    cache, transfers = make(ONE_DEVICE)
    runs = transfers.warm_ups(cache, [0, 2])
    assert len(runs) == 3 * 6  # parts by group, sizes
    for run in runs[5::6]:
        cache = run(cache)
    assert not any(np.asarray(x).any() for kv in cache for x in (kv.k_NKSh, kv.v_NKSh))
