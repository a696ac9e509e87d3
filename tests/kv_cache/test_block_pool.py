"""Reference counts and the queue of free blocks."""

import pytest

from jaxinfer.kv_cache.block_pool import BlockPool


def test_a_pool_needs_a_block_besides_padding():
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)


def test_kvc_08_block_0_is_never_handed_out():
    pool = BlockPool(5)
    assert pool.num_usable == 4
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(AssertionError):
        pool.take(1)


def test_kvc_08_entries_of_block_0_are_skipped():
    pool = BlockPool(3)
    pool.share([0, 0])
    pool.release([0])
    assert pool.references(0) == 0
    assert not pool.is_free(0)
    pool.check_integrity([[0, 0]])


def test_least_recently_used_first():
    pool = BlockPool(5)
    a = pool.take(2)
    pool.release(a)
    assert pool.free_order() == (3, 4, 1, 2)
    assert pool.take(3) == [3, 4, 1]


def test_reuse_first_goes_to_the_front():
    pool = BlockPool(5)
    a, b = pool.take(1), pool.take(1)
    pool.release(a)
    pool.release(b, reuse_first=True)
    assert pool.free_order() == (2, 3, 4, 1)


def test_shared_blocks_are_free_after_the_last_release():
    pool = BlockPool(4)
    (block,) = pool.take(1)
    pool.share([block])
    assert pool.references(block) == 2
    pool.release([block])
    assert not pool.is_free(block)
    pool.release([block])
    assert pool.is_free(block)


def test_sharing_a_free_block_takes_it_out_of_the_queue():
    pool = BlockPool(4)
    (block,) = pool.take(1)
    pool.release([block])
    pool.share([block])
    assert block not in pool.free_order()
    pool.check_integrity([[block]])


def test_release_without_a_reference_is_refused():
    pool = BlockPool(4)
    (block,) = pool.take(1)
    pool.release([block])
    with pytest.raises(AssertionError, match="more often"):
        pool.release([block])


@pytest.mark.parametrize("tables", [[], [[1], [1]], [[2]]])
def test_integrity_notices_wrong_counts(tables):
    pool = BlockPool(4)
    pool.take(1)
    pool.check_integrity([[1]])
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)
