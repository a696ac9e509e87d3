"""Guesses of the next tokens of a sequence: a chain, or a tree."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

ROOT = -1
"""Parent of the drafts that may follow the newest token of the sequence."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses behind the newest token of a sequence.

    Attributes:
        tokens: the guesses; each stands one position behind its parent.
        parents: index of the draft before each one, or ``ROOT`` for those that follow the newest token; it comes first.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: Iterable[int]) -> "Drafts":
        """Each draft follows the one before it."""
        tokens = tuple(tokens)
        return cls(tokens, tuple(range(-1, len(tokens) - 1)))

    @classmethod
    def tree(cls, tokens: Sequence[int], parents: Sequence[int]) -> "Drafts":
        """A checked tree.

        Raises:
            ValueError: lengths differ, a parent does not come first, or a parent has a child twice.
        """
        if len(tokens) != len(parents):
            raise ValueError(f"a draft tree has {len(tokens)} tokens and {len(parents)} parents")
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise ValueError(f"draft {node} has parent {parent}; allowed: -1 to {node - 1}")
        if len(set(zip(parents, tokens))) < len(tokens):
            raise ValueError("a draft tree has the same token twice behind one parent")
        return cls(tuple(tokens), tuple(parents))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    @property
    def depths(self) -> tuple[int, ...]:
        """Positions of the drafts behind the newest token, from 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def first(self, count: int) -> "Drafts":
        """The first drafts, whose parents are among them."""
        return self if count >= len(self.tokens) else Drafts(self.tokens[:count], self.parents[:count])

    def up_to_depth(self, depth: int) -> "Drafts":
        """The drafts that stand at most so many positions behind the newest token."""
        depths = self.depths
        if max(depths, default=0) <= depth:
            return self
        kept = [node for node, d in enumerate(depths) if d <= depth]
        index = {-1: -1} | {node: i for i, node in enumerate(kept)}
        return Drafts(
            tuple(self.tokens[node] for node in kept), tuple(index[self.parents[node]] for node in kept)
        )

    def matching(self, samples: Sequence[int]) -> list[int]:
        """The drafts, from the first position on, that equal the sample behind the draft before them.

        Args:
            samples: the sample behind the newest token, then those behind each draft.
        """
        path: list[int] = []
        at = -1
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents)):
            if parent == at and token == samples[at + 1]:
                path.append(node)
                at = node
        return path

    def along(self, tokens: Iterable[int]) -> list[int]:
        """The drafts on the path of known tokens, as far as it goes."""
        children = {
            (parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.tokens))
        }
        path: list[int] = []
        at = -1
        for token in tokens:
            if (node := children.get((at, token))) is None:
                break
            path.append(node)
            at = node
        return path

    def path(self, node: int) -> tuple[int, ...]:
        """The drafts from the first position on to a draft, that draft included."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))


NO_DRAFTS = Drafts()


def ancestor_words(parents: Sequence[int], words: int | None = None) -> np.ndarray:
    """Tree masks of a row that holds the newest token and then the drafts, for ``ragged_paged_attention``.

    Args:
        words: width of the result; default: as many as the row needs.

    Returns:
        int32 ``[1 + drafts, words]``: bit b of word u of a token says that it sees token 32 * u + b of the row. Each
        token sees itself, its ancestors and the newest token.

    Raises:
        ValueError: the row does not fit into ``words``.
    """
    nodes = len(parents) + 1
    needed = -(-nodes // 32)
    if words is not None and words < needed:
        raise ValueError(f"{nodes} tokens need {needed} words of a mask, not {words}")
    seen_NU = np.zeros((nodes, words or needed), np.uint32)
    seen_NU[0, 0] = 1
    for node, parent in enumerate(parents, start=1):
        seen_NU[node] = seen_NU[parent + 1]
        seen_NU[node, node // 32] |= np.uint32(1 << (node % 32))
    return seen_NU.view(np.int32)
