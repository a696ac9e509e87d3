"""The tree of cached blocks."""

from jaxinfer.kv_cache.digests import block_digest, root_digest
from jaxinfer.kv_cache.prefix_cache import PrefixCache

ROOT = root_digest({})


def file(cache: PrefixCache, ids: list[int], *blocks: int, parent: bytes = ROOT) -> bytes:
    digest = block_digest(parent, ids)
    cache.file(digest, parent, tuple(ids), list(blocks))
    return digest


def test_found_by_digest_until_evicted():
    cache = PrefixCache(1)
    digest = file(cache, [1, 2, 3, 4], 5)
    node = cache.get(digest)
    assert node is not None
    assert node.blocks == [5]
    assert cache.holds(0, 5)
    cache.evict(0, 5)
    assert cache.get(digest) is None
    assert not cache.holds(0, 5)
    assert len(cache) == 0
    cache.check_integrity()


def test_the_first_block_with_a_content_is_kept():
    cache = PrefixCache(1)
    digest = file(cache, [1, 2, 3, 4], 5)
    file(cache, [1, 2, 3, 4], 6)
    node = cache.get(digest)
    assert node is not None
    assert node.blocks == [5]
    assert not cache.holds(0, 6)


def test_a_block_holds_one_content():
    cache = PrefixCache(1)
    file(cache, [1, 2, 3, 4], 5)
    other = file(cache, [5, 6, 7, 8], 5)
    assert cache.get(other) is None
    assert len(cache) == 1
    cache.check_integrity()


def test_groups_are_evicted_one_by_one():
    cache = PrefixCache(2)
    digest = file(cache, [1, 2, 3, 4], 5, 7)
    cache.evict(1, 7)
    node = cache.get(digest)
    assert node is not None
    assert node.blocks == [5, 0]
    cache.check_integrity()
    cache.evict(0, 5)
    assert cache.get(digest) is None


def test_filing_again_fills_the_groups_that_lost_it():
    cache = PrefixCache(2)
    digest = file(cache, [1, 2, 3, 4], 5, 7)
    cache.evict(1, 7)
    file(cache, [1, 2, 3, 4], 6, 8)
    node = cache.get(digest)
    assert node is not None
    assert node.blocks == [5, 8]
    assert not cache.holds(0, 6)
    cache.check_integrity()


def test_groups_without_the_block_are_left_open():
    cache = PrefixCache(2)
    digest = file(cache, [1, 2, 3, 4], 5, 0)
    node = cache.get(digest)
    assert node is not None
    assert node.blocks == [5, 0]
    cache.check_integrity()


def test_partial_hits_take_the_longest_common_prefix():
    cache = PrefixCache(1)
    file(cache, [1, 2, 9, 9], 5)
    best = file(cache, [1, 2, 3, 9], 6)
    file(cache, [1, 9, 9, 9], 7)
    node, length = cache.longest_partial(ROOT, [1, 2, 3, 4])
    assert node is cache.get(best)
    assert length == 3
    assert cache.longest_partial(ROOT, [2, 2, 3, 4]) == (None, 0)
    assert cache.longest_partial(ROOT, []) == (None, 0)
    assert cache.longest_partial(block_digest(ROOT, [0]), [1, 2, 3, 4]) == (None, 0)


def test_partial_hits_need_every_group():
    cache = PrefixCache(2)
    file(cache, [1, 2, 3, 4], 5, 0)
    assert cache.longest_partial(ROOT, [1, 2, 3, 9]) == (None, 0)


def test_children_stay_when_the_parent_is_evicted_and_refiled():
    cache = PrefixCache(1)
    parent = file(cache, [1, 2, 3, 4], 5)
    child = file(cache, [5, 6, 7, 8], 6, parent=parent)
    cache.evict(0, 5)
    assert cache.get(parent) is None
    assert cache.get(child) is not None
    assert file(cache, [1, 2, 3, 4], 9) == parent
    node, length = cache.longest_partial(parent, [5, 6])
    assert node is cache.get(child)
    assert length == 2


def test_clear():
    cache = PrefixCache(2)
    file(cache, [1, 2, 3, 4], 5, 6)
    cache.clear()
    assert len(cache) == 0
    assert not cache.holds(0, 5)
    assert cache.longest_partial(ROOT, [1, 2]) == (None, 0)
    cache.check_integrity()


def test_work_after_a_common_prefix_is_bounded():
    """Only the newest siblings are compared."""
    cache = PrefixCache(1)
    for i in range(100):
        file(cache, [1, 2, i, i], i + 1)
    assert cache.longest_partial(ROOT, [1, 2, 99, 0]) == (cache.get(block_digest(ROOT, [1, 2, 99, 99])), 3)
    node, length = cache.longest_partial(ROOT, [1, 2, 0, 0])
    assert node is not None
    assert length == 2
