"""Content of cached blocks: which full blocks hold which tokens, over all KV groups."""

from collections.abc import Collection
from dataclasses import dataclass

_MAX_CANDIDATES = 16
"""Siblings compared when a prefix ends inside a block: bounds the work after a very common prefix."""


@dataclass(eq=False, slots=True)
class CachedBlock:
    """A full block of tokens, and where its K and V are.

    Attributes:
        blocks: block id per KV group, or 0 where that group does not hold it (any more).
    """

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    blocks: list[int]


class PrefixCache:
    """A tree of full blocks, found by digest; a node lives while some group holds its content.

    The children of a digest are indexed by their first token, oldest first, and stay when the parent goes.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._nodes: dict[bytes, CachedBlock] = {}
        self._children: dict[bytes, dict[int, dict[bytes, None]]] = {}
        self._owner: list[dict[int, CachedBlock]] = [{} for _ in range(num_groups)]

    def __len__(self) -> int:
        return len(self._nodes)

    def blocks(self, group: int) -> Collection[int]:
        """The blocks of a group that hold content; stays up to date."""
        return self._owner[group].keys()

    def get(self, digest: bytes) -> CachedBlock | None:
        return self._nodes.get(digest)

    def file(self, digest: bytes, parent: bytes, token_ids: tuple[int, ...], blocks: list[int]) -> None:
        """Records a full block. Groups that hold the same content already keep their block.

        Args:
            blocks: block id per group; 0 where the sequence does not have it.
        """
        node = self._nodes.get(digest)
        fresh = [
            (group, block)
            for group, block in enumerate(blocks)
            if block and block not in self._owner[group] and (node is None or not node.blocks[group])
        ]
        if not fresh:
            return
        if node is None:
            node = CachedBlock(digest, parent, token_ids, [0] * self._num_groups)
            self._nodes[digest] = node
            self._children.setdefault(parent, {}).setdefault(token_ids[0], {})[digest] = None
        for group, block in fresh:
            node.blocks[group] = block
            self._owner[group][block] = node

    def evict(self, group: int, block: int) -> None:
        """Forgets what a block holds, if anything: it is about to be overwritten, or is not to be trusted."""
        node = self._owner[group].pop(block, None)
        if node is not None:
            node.blocks[group] = 0
            if not any(node.blocks):
                self._remove(node)

    def holds(self, group: int, block: int) -> bool:
        return block in self._owner[group]

    def longest_partial(self, parent: bytes, token_ids: list[int]) -> tuple[CachedBlock | None, int]:
        """The child of ``parent`` that shares most leading tokens, held by every group.

        Returns:
            The node and the number of equal leading tokens (0 with None).
        """
        best: CachedBlock | None = None
        best_length = 0
        siblings = self._children.get(parent, {}).get(token_ids[0], {}) if token_ids else {}
        for digest in list(reversed(siblings))[:_MAX_CANDIDATES]:
            node = self._nodes[digest]
            if all(node.blocks):
                length = _common_prefix(node.token_ids, token_ids)
                if length > best_length:
                    best, best_length = node, length
        return best, best_length

    def clear(self) -> None:
        self._nodes.clear()
        self._children.clear()
        for owner in self._owner:
            owner.clear()

    def check_integrity(self) -> None:
        """Asserts that nodes and owners agree."""
        for group, owner in enumerate(self._owner):
            assert 0 not in owner, "block 0 is cached"
            for block, node in owner.items():
                assert node.blocks[group] == block, "owner index differs from the node"
                assert self._nodes.get(node.digest) is node, "an owned node is not in the tree"
        for node in self._nodes.values():
            assert any(node.blocks), "a node without blocks is in the tree"

    def _remove(self, node: CachedBlock) -> None:
        del self._nodes[node.digest]
        by_token = self._children[node.parent]
        first = node.token_ids[0]
        del by_token[first][node.digest]
        if not by_token[first]:
            del by_token[first]
        if not by_token:
            del self._children[node.parent]


def _common_prefix(a: tuple[int, ...], b: list[int]) -> int:
    length = 0
    for x, y in zip(a, b):
        if x != y:
            break
        length += 1
    return length
