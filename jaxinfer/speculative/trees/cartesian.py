"""Medusa's trees: products of the best guesses of independent heads (Cai et al. 2024, arXiv:2401.10774)."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.drafts import ROOT, Drafts

Choice = tuple[int, ...]
"""A node: the rank of the guess that each head up to the node's depth contributes. (0, 2) is the third guess of the
second head behind the best guess of the first."""


@dataclass(frozen=True)
class CartesianTree:
    """A tree whose shape is fixed. Nodes are ordered by depth, parents before children.

    Attributes:
        parents: as ``Drafts.parents``.
        heads, ranks: per node, which head says its token, and which of its guesses it is.
    """

    parents: tuple[int, ...]
    heads: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def make(cls, choices: Iterable[Sequence[int]]) -> "CartesianTree":
        """Args:
            choices: the nodes.

        Raises:
            ValueError: a node is empty, negative, named twice, or without its parent; the message says which.
        """
        nodes = sorted((tuple(choice) for choice in choices), key=lambda choice: (len(choice), choice))
        place: dict[Choice, int] = {(): ROOT}
        for choice in nodes:
            if not choice or min(choice) < 0:
                raise ValueError(f"{list(choice)} is no node of a tree: a list of ranks from 0 on is needed")
            if choice in place:
                raise ValueError(f"node {list(choice)} is named twice")
            if choice[:-1] not in place:
                raise ValueError(f"node {list(choice)} lacks its parent {list(choice[:-1])}")
            place[choice] = len(place) - 1
        return cls(
            tuple(place[choice[:-1]] for choice in nodes),
            tuple(len(choice) - 1 for choice in nodes),
            tuple(choice[-1] for choice in nodes),
        )

    @property
    def num_heads(self) -> int:
        """Heads that the tree needs."""
        return max(self.heads, default=-1) + 1

    @property
    def num_ranks(self) -> int:
        """Guesses that it needs of each head."""
        return max(self.ranks, default=-1) + 1

    def fill(self, token_KX: np.ndarray) -> Drafts:
        """The tree with the guesses of the heads: ``[heads, ranks]``, best first, different for one head."""
        tokens = (int(token_KX[head, rank]) for head, rank in zip(self.heads, self.ranks))
        return Drafts(tuple(tokens), self.parents)


def best_choices(probability_KX: np.ndarray, size: int) -> tuple[Choice, ...]:
    """The ``size`` nodes with the largest products, which is the best tree of that size for independent heads.

    With the measured acceptance of each head's guesses this makes a fixed tree (the paper's sparse tree); with the
    probabilities of one step, a tree for that step.

    Args:
        probability_KX: ``[heads, ranks]`` in [0, 1], decreasing along the ranks.
    """
    K, X = probability_KX.shape
    waiting: list[tuple[float, Choice]] = [(-float(probability_KX[0, 0]), (0,))] if K and X else []
    found: list[Choice] = []
    while waiting and len(found) < size:
        negative, choice = heapq.heappop(waiting)
        found.append(choice)
        head, rank = len(choice) - 1, choice[-1]
        # Each node is reached once: as the next guess behind the same parent, or as the best guess of the next head.
        if rank + 1 < X and probability_KX[head, rank] > 0:
            step = float(probability_KX[head, rank + 1] / probability_KX[head, rank])
            heapq.heappush(waiting, (negative * step, (*choice[:-1], rank + 1)))
        if head + 1 < K:
            heapq.heappush(waiting, (negative * float(probability_KX[head + 1, 0]), (*choice, 0)))
    return tuple(found)
