"""The KV cache as the scheduler sees it: prefix hits, allocation, forks and release, over all KV groups."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jaxinfer.kv_cache.block_pool import BlockPool
from jaxinfer.kv_cache.digests import block_digest, prompt_root
from jaxinfer.kv_cache.prefix_cache import CachedBlock, PrefixCache
from jaxinfer.request import Sequence


@dataclass(frozen=True)
class BlockCopy:
    """A block whose content the device must copy before the step: copy-on-write of a partly shared block."""

    group: int
    source: int
    target: int


class SlotMove(NamedTuple):
    """K and V of a token that go to another slot: those of an accepted draft of a tree.

    Attributes:
        source, target: ``block * S + offset``.
    """

    group: int
    source: int
    target: int


@dataclass(frozen=True)
class PrefixHit:
    """What the prefix cache holds of a sequence.

    Attributes:
        num_tokens: tokens that need not be computed.
        tables: leading block ids per group; 0 where a block lies before the sliding window.
        partial: node whose block must be copied, as the last tokens of the hit end inside it.
    """

    num_tokens: int
    tables: tuple[tuple[int, ...], ...]
    partial: CachedBlock | None = None


class KVCacheManager:
    """Owns the block pools and the prefix cache.

    Args:
        num_blocks: size of the pool of each group.
        block_size: S.
        windows: sliding window of each group, or None.
        prefix_caching: whether full blocks are filed and found again.
    """

    def __init__(
        self,
        num_blocks: tuple[int, ...],
        block_size: int,
        windows: tuple[int | None, ...],
        prefix_caching: bool,
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        self._windowed = [group for group, window in enumerate(windows) if window is not None]
        self.prefix_caching = prefix_caching
        self.cache = PrefixCache(len(windows))
        self.pools = tuple(BlockPool(n, self.cache.blocks(group)) for group, n in enumerate(num_blocks))

    # ---- questions

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_tokens(self, chunk: int) -> int:
        """The longest sequence that fits the pools when it is alone.

        Args:
            chunk: most tokens of a sequence that a step computes. A window moves on when a step is committed; until
                then two chunks and what the first of them sees are held.
        """
        longest = 1 << 40
        for pool, window in zip(self.pools, self.windows):
            if window is None or pool.num_usable <= self.blocks_for(window + 2 * chunk):
                longest = min(longest, pool.num_usable * self.block_size)
        return longest

    def first_visible(self, group: int, position: int) -> int:
        """Index of the first block that a token at ``position`` can see in this group."""
        window = self.windows[group]
        return 0 if window is None else max(position - window + 1, 0) // self.block_size

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold; blocks that are only cached count as free."""
        total = sum(pool.num_usable for pool in self.pools)
        return 1.0 - sum(pool.num_free for pool in self.pools) / total

    @property
    def num_cached_free(self) -> int:
        """Blocks that no sequence holds, but that can still be hit."""
        return sum(pool.num_cached_free for pool in self.pools)

    def find(self, seq: Sequence) -> PrefixHit:
        """Looks up the longest cached prefix of a sequence, at token granularity; at least one token is left over.

        A group with a sliding window needs only the blocks that the next token can see.
        """
        limit = seq.num_tokens - 1
        empty = PrefixHit(0, tuple(() for _ in self.windows))
        if not self.prefix_caching or seq.request.params.skip_reading_prefix_cache or limit < 1:
            return empty
        nodes = self._chain(seq, limit)
        count = self._longest_held(nodes)
        start = count * self.block_size
        parent = self._digest(seq, count - 1)
        partial, extra = self.cache.longest_partial(
            parent, seq.token_ids(start, min(start + self.block_size, limit))
        )
        tables = tuple(
            tuple(0 if i < self.first_visible(g, start) else _block(nodes[i], g) for i in range(count))
            for g in range(len(self.windows))
        )
        return PrefixHit(start + extra, tables, partial)

    # ---- changes

    def admit(
        self, seq: Sequence, hit: PrefixHit, num_tokens: int, reserve_tokens: int
    ) -> list[BlockCopy] | None:
        """Gives a sequence its hit blocks and new ones for ``num_tokens`` tokens: all of it, or nothing.

        Args:
            reserve_tokens: blocks for so many tokens must be free (the whole prompt, though only its first chunk
                is allocated), so that admission does not run into preemption at once.

        Returns:
            The copies to make before the step, or None if the blocks are not there; then nothing changed.
        """
        assert not any(seq.tables), "an admitted sequence holds no blocks"
        needed = []
        for group, pool in enumerate(self.pools):
            held = hit.tables[group]
            in_queue = sum(1 for b in held if b and pool.is_free(b))
            wanted = max(num_tokens, reserve_tokens if self.windows[group] is None else 0)
            if self.blocks_for(wanted) - len(held) > pool.num_free - in_queue:
                return None
            needed.append(self.blocks_for(num_tokens) - len(held))
        copies = []
        for group, pool in enumerate(self.pools):
            pool.share(hit.tables[group])
            source = hit.partial.blocks[group] if hit.partial is not None else 0
            seq.tables[group] = list(hit.tables[group]) + self._take(group, needed[group])
            if source:
                copies.append(BlockCopy(group, source, seq.tables[group][len(hit.tables[group])]))
        seq.num_filed = min(len(table) for table in hit.tables)
        return copies

    def admit_remote(
        self, seq: Sequence, hit: PrefixHit, num_tokens: int, reserve_tokens: int
    ) -> tuple[range, ...] | None:
        """As ``admit``, for blocks that another engine computes: those that the token behind them can see.

        Args:
            hit: its part that lies inside a block is of no use here.
            num_tokens: in these blocks, the hit included; the last block need not be full.

        Returns:
            Numbers of the missing blocks in each group's table, or None if the blocks are not there.
        """
        assert not any(seq.tables), "an admitted sequence holds no blocks"
        count = self.blocks_for(num_tokens)
        missing: list[range] = []
        kept: list[list[int]] = []
        for group, pool in enumerate(self.pools):
            held, first = hit.tables[group], self.first_visible(group, num_tokens)
            kept.append([block if index >= first else 0 for index, block in enumerate(held)])
            missing.append(range(max(len(held), first), count))
            in_queue = sum(1 for block in kept[group] if block and pool.is_free(block))
            rest = self.blocks_for(reserve_tokens) - count if self.windows[group] is None else 0
            if len(missing[group]) + rest > pool.num_free - in_queue:
                return None
        for group, pool in enumerate(self.pools):
            pool.share(kept[group])
            before = [0] * (missing[group].start - len(kept[group]))
            seq.tables[group] = kept[group] + before + self._take(group, len(missing[group]))
        seq.num_filed = min(len(table) for table in hit.tables)
        return tuple(missing)

    def chain_digest(self, seq: Sequence, num_blocks: int) -> bytes:
        """Names the content of the first full blocks of a sequence, in the prefix cache of any engine."""
        return self._digest(seq, num_blocks - 1)

    def capacity(self, seq: Sequence) -> int:
        """Tokens that a sequence has blocks for."""
        return min(map(len, seq.tables)) * self.block_size

    def extend(self, seq: Sequence, num_tokens: int, spare: int = 0) -> bool:
        """Makes room for ``num_tokens`` tokens in all groups; on False nothing changed.

        Args:
            spare: blocks of each group that must stay free.
        """
        wanted = -(-num_tokens // self.block_size)
        for table in seq.tables:
            if len(table) < wanted:
                break
        else:
            return True  # nearly every step of a decode
        missing = [wanted - len(table) for table in seq.tables]
        if any(m > pool.num_free - spare for m, pool in zip(missing, self.pools)):
            return False
        for group, count in enumerate(missing):
            if count > 0:
                seq.tables[group] += self._take(group, count)
        return True

    def can_fork(self, parent: Sequence, num_tokens: int) -> bool:
        """Whether the parent still holds all that a token at position ``num_tokens`` can see."""
        count = self.blocks_for(num_tokens)
        return parent.num_computed >= num_tokens and all(
            all(table[self.first_visible(group, num_tokens) : count])
            for group, table in enumerate(parent.tables)
        )

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        """Shares the first ``num_tokens`` tokens of a running sequence; the partly filled block is copied.

        ``can_fork`` must hold.

        Returns:
            The copies, or None if the blocks are not there; then nothing changed.
        """
        full = num_tokens // self.block_size
        rest = 1 if num_tokens % self.block_size else 0
        if any(pool.num_free < rest for pool in self.pools):
            return None
        copies = []
        for group, pool in enumerate(self.pools):
            shared = parent.tables[group][:full]
            pool.share(shared)
            child.tables[group] = shared + self._take(group, rest)
            if rest:
                copies.append(BlockCopy(group, parent.tables[group][full], child.tables[group][full]))
        child.num_filed = full
        return copies

    def commit(self, seq: Sequence) -> None:
        """Files the blocks that became full and sound, and releases those that left the window."""
        if self.prefix_caching and seq.num_filed < seq.num_committed // self.block_size:
            self._file(seq)
        for group in self._windowed:
            self._release_before(seq, group, self.first_visible(group, seq.num_committed))

    def release(self, seq: Sequence) -> None:
        """Drops all blocks of a sequence; the end of the chain is reused before its beginning."""
        for group, pool in enumerate(self.pools):
            cached = [b for b in seq.tables[group] if self.cache.holds(group, b)]
            others = [b for b in seq.tables[group] if not self.cache.holds(group, b)]
            pool.release(reversed(others), reuse_first=True)
            pool.release(reversed(cached))
            seq.tables[group] = []
        seq.num_filed = 0

    def forget(self, seq: Sequence) -> None:
        """Removes the content of a sequence's tokens from the prefix cache, also where it is in blocks that it gave
        back or shares: the content is not to be trusted."""
        known = seq.num_prompt + len(seq.output_token_ids)
        for index in range(known // self.block_size):
            node = self.cache.get(self._digest(seq, index))
            for group, block in enumerate(node.blocks if node is not None else ()):
                self.pools[group].content_forgotten(block)
                self.cache.evict(group, block)

    def reset_prefix_cache(self) -> int:
        """Forgets all cached content; returns how many free blocks lost it. Blocks in use stay with their sequences."""
        count = self.num_cached_free
        for group, pool in enumerate(self.pools):
            for block in pool.free_order():
                pool.content_forgotten(block)
                self.cache.evict(group, block)
        self.cache.clear()
        return count

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Asserts that pools, tables and prefix cache agree, given every sequence that holds blocks."""
        sequences = list(live)
        for group, pool in enumerate(self.pools):
            pool.check_integrity(seq.tables[group] for seq in sequences)
        self.cache.check_integrity()

    # ---- parts

    def _take(self, group: int, count: int) -> list[int]:
        blocks = self.pools[group].take(count) if count > 0 else []
        for block in blocks:
            self.cache.evict(group, block)
        return blocks

    def _digest(self, seq: Sequence, index: int) -> bytes:
        """Digest of full block ``index``; -1 is the root."""
        if not seq.digests:
            seq.digests.append(prompt_root(seq.request.cache_salt))
        while len(seq.digests) <= index + 1:
            start = (len(seq.digests) - 1) * self.block_size
            ids = seq.token_ids(start, start + self.block_size)
            seq.digests.append(block_digest(seq.digests[-1], ids))
        return seq.digests[index + 1]

    def _chain(self, seq: Sequence, limit: int) -> list[CachedBlock | None]:
        """The cached blocks of a sequence, up to the first one that a group without a window lacks."""
        nodes: list[CachedBlock | None] = []
        for index in range(limit // self.block_size):
            node = self.cache.get(self._digest(seq, index))
            if any(w is None and not _block(node, group) for group, w in enumerate(self.windows)):
                break
            nodes.append(node)
        return nodes

    def _longest_held(self, nodes: list[CachedBlock | None]) -> int:
        """The largest number of leading blocks that every group holds as far as it can see."""
        count = len(nodes)
        while count and not self._window_held(nodes, count):
            count -= 1
        return count

    def _window_held(self, nodes: list[CachedBlock | None], count: int) -> bool:
        start = count * self.block_size
        return all(
            _block(nodes[i], group)
            for group, window in enumerate(self.windows)
            if window is not None
            for i in range(self.first_visible(group, start), count)
        )

    def _file(self, seq: Sequence) -> None:
        full = seq.num_committed // self.block_size
        while seq.num_filed < full:
            index = seq.num_filed
            digest = self._digest(seq, index)
            ids = seq.token_ids(index * self.block_size, (index + 1) * self.block_size)
            blocks = [table[index] for table in seq.tables]
            self.cache.file(digest, self._digest(seq, index - 1), tuple(ids), blocks)
            seq.num_filed += 1

    def _release_before(self, seq: Sequence, group: int, first: int) -> None:
        table = seq.tables[group]
        gone = []
        index = first - 1
        while index >= 0 and table[index]:
            gone.append(table[index])
            table[index] = 0
            index -= 1
        self.pools[group].release(reversed(gone))


def _block(node: CachedBlock | None, group: int) -> int:
    """The block of a group that holds a node's content; 0 if there is none."""
    return 0 if node is None else node.blocks[group]
