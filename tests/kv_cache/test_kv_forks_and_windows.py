"""Forks, and groups of layers with a sliding window."""

import pytest

from jaxinfer.kv_cache.manager import BlockCopy
from tests.support.kv import BLOCK, compute, manager, seq_of

# ---- forks


def test_fork_shares_full_blocks_and_copies_the_partial_one():
    kv = manager()
    parent = seq_of(range(10), kv)
    compute(kv, parent)
    child = seq_of(range(10), kv, index=1, parent=parent)
    assert kv.can_fork(parent, 9)
    copies = kv.fork(parent, child, 9)
    assert copies == [BlockCopy(0, parent.tables[0][2], child.tables[0][2])]
    assert child.tables[0][:2] == parent.tables[0][:2]
    assert kv.pools[0].references(parent.tables[0][0]) == 2
    kv.check_integrity([parent, child])
    kv.release(parent)
    kv.check_integrity([child])
    kv.release(child)
    assert kv.pools[0].num_free == kv.pools[0].num_usable


def test_fork_at_a_block_border_needs_no_block():
    kv = manager(3)
    parent = seq_of(range(8), kv)
    compute(kv, parent)
    child = seq_of(range(9), kv)
    assert kv.fork(parent, child, 8) == []
    assert child.tables == parent.tables


def test_fork_without_a_free_block_changes_nothing():
    kv = manager(3)
    parent = seq_of(range(6), kv)
    compute(kv, parent)
    child = seq_of(range(6), kv)
    assert kv.fork(parent, child, 5) is None
    assert child.tables == [[]]
    kv.check_integrity([parent])


def test_can_fork_needs_computed_tokens_and_visible_blocks():
    kv = manager(windows=(4, None), num_blocks=12)
    parent = seq_of(range(12), kv)
    kv.admit(parent, kv.find(parent), 8, 12)
    parent.num_computed = 8
    assert kv.can_fork(parent, 8)
    assert not kv.can_fork(parent, 9)
    parent.num_committed = 8
    kv.commit(parent)
    assert kv.can_fork(parent, 8)
    for length in (12, 20):
        kv.extend(parent, length)
        parent.output_token_ids = list(range(50, 58))
        parent.num_computed = parent.num_committed = length
        kv.commit(parent)
    assert parent.tables[0][:4] == [0] * 4
    assert not kv.can_fork(parent, 11)
    kv.check_integrity([parent])


# ---- sliding windows


@pytest.mark.parametrize("length", [7, 8, 9, 12, 16, 24])
def test_kvc_06_blocks_that_left_the_window_are_released(length):
    """Block size 4, window 8: what a token at ``length`` sees starts at length - 7."""
    kv = manager(windows=(8, None), num_blocks=20)
    a = seq_of(range(length), kv)
    compute(kv, a)
    gone = max(length - 7, 0) // BLOCK
    assert a.tables[0][:gone] == [0] * gone
    assert all(a.tables[0][gone:])
    assert all(a.tables[1])
    kv.check_integrity([a])


def test_kvc_06_a_hit_needs_the_last_window_only():
    kv = manager(windows=(8,), num_blocks=8)
    a = seq_of(range(24), kv)
    compute(kv, a, 12)
    for stop in (16, 20, 24):
        assert kv.extend(a, stop)
        a.num_computed = a.num_committed = stop
        kv.commit(a)
    kv.release(a)
    taken = kv.pools[0].take(3)  # the oldest: those that left the window first
    for block in taken:
        kv.cache.evict(0, block)
    hit = kv.find(seq_of([*range(24), 99], kv))
    assert hit.num_tokens == 24
    assert hit.tables[0][:4] == (0, 0, 0, 0)
    assert all(hit.tables[0][4:])
    assert kv.find(seq_of([*range(8), 99], kv)).num_tokens < 8, "its blocks are gone"


def test_kvc_06_no_hit_when_a_visible_block_is_gone():
    kv = manager(windows=(8, None), num_blocks=12)
    a = seq_of(range(16), kv)
    compute(kv, a)
    kv.cache.evict(0, a.tables[0][2])
    hit = kv.find(seq_of([*range(16), 99], kv))
    assert hit.num_tokens <= 8
    kv.release(a)


@pytest.mark.parametrize(
    ("num_blocks", "window", "chunk", "expected"),
    [(9, None, 4, 32), (9, 8, 4, None), (5, 8, 4, 16), (6, 8, 4, None), (5, 8, 64, 16)],
)
def test_the_longest_sequence_that_fits(num_blocks, window, chunk, expected):
    """A windowed pool holds any length once it has room for the window, two chunks and a block."""
    kv = manager(num_blocks, windows=(window,))
    assert kv.max_tokens(chunk) == (expected or 1 << 40)
