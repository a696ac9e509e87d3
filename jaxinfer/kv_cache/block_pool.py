"""Blocks of one KV group: reference counts and the queue of free blocks."""

from collections import OrderedDict
from collections.abc import Container, Iterable


class BlockPool:
    """Hands out block ids 1 to N - 1; block 0 belongs to padding.

    A block with no references is free. Free blocks form a queue, least recently used first; a free block may still
    hold cached content until it is handed out again.

    Args:
        cached: blocks that hold cached content, as the prefix cache sees it at any time.
    """

    def __init__(self, num_blocks: int, cached: Container[int] = ()) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"a block pool needs at least 2 blocks (one is reserved for padding), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._cached = cached
        self._num_cached_free = 0

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached_free(self) -> int:
        """Free blocks that hold cached content."""
        return self._num_cached_free

    def is_free(self, block: int) -> bool:
        return block in self._free

    def references(self, block: int) -> int:
        return self._references[block]

    def take(self, count: int) -> list[int]:
        """Removes the ``count`` least recently used blocks from the queue and gives each one reference.

        The caller checks ``num_free`` first: allocation is all or nothing.
        """
        assert count <= len(self._free), "allocation must be checked before it is made"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            self._num_cached_free -= block in self._cached
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block, free ones included; block 0 entries are skipped."""
        for block in blocks:
            if block:
                if self._references[block] == 0:
                    del self._free[block]
                    self._num_cached_free -= block in self._cached
                self._references[block] += 1

    def release(self, blocks: Iterable[int], reuse_first: bool = False) -> None:
        """Drops a reference of each block, in order; those without any join the free queue.

        Args:
            blocks: the one that should be reused first comes first. Block 0 entries are skipped.
            reuse_first: put them at the front of the queue (content that nobody will ask for again).
        """
        for block in blocks:
            if block:
                assert self._references[block] > 0, f"block {block} is released more often than it was taken"
                self._references[block] -= 1
                if self._references[block] == 0:
                    self._free[block] = None
                    self._num_cached_free += block in self._cached
                    if reuse_first:
                        self._free.move_to_end(block, last=False)

    def content_forgotten(self, block: int) -> None:
        """To be called when a block that was not handed out is about to lose its cached content."""
        self._num_cached_free -= block in self._free and block in self._cached

    def free_order(self) -> tuple[int, ...]:
        """The free queue, next block to hand out first."""
        return tuple(self._free)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Asserts that the references are exactly those of the given block tables.

        Args:
            tables: the block table of every live sequence.
        """
        counted = [0] * self.num_blocks
        for table in tables:
            for block in table:
                if block:
                    counted[block] += 1
        assert counted == self._references, "reference counts differ from the block tables"
        assert self._references[0] == 0, "block 0 was handed out"
        expected = {b for b in range(1, self.num_blocks) if not counted[b]}
        assert set(self._free) == expected, "the free queue differs from the blocks without references"
        cached = sum(block in self._cached for block in self._free)
        assert cached == self._num_cached_free, "the count of free cached blocks is off"
