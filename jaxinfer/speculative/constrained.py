"""Drafts of sequences under a form: masks while they are made, and the tokens that the form forces."""

from collections.abc import Sequence

import numpy as np

from jaxinfer.drafts import Drafts
from jaxinfer.request import Sequence as Seq
from jaxinfer.speculative.drafter import DraftJob
from jaxinfer.structured.constraint import Constraint


class ConstrainedPaths:
    """Where each constrained sequence of a round of drafting is, for drafters that draw token by token."""

    def __init__(self, jobs: Sequence[DraftJob]) -> None:
        self._paths: dict[Seq, Constraint] = {}
        self._masks: dict[Seq, np.ndarray] = {}
        for job in jobs:
            if job.seq.constraint is not None:
                self._paths[job.seq] = job.seq.constraint.fork()
                self._look(job.seq)

    def ends(self, seq: Seq) -> bool:
        """Nothing may follow the drafts of a sequence."""
        return seq in self._paths and seq not in self._masks

    def masks(self, sequences: Sequence[Seq]) -> dict[int, np.ndarray]:
        """What the next draft of each sequence may be, by index; nothing for those that are free."""
        return {i: self._masks[seq] for i, seq in enumerate(sequences) if seq in self._masks}

    def accept(self, sequences: Sequence[Seq], tokens: Sequence[int]) -> None:
        """The next draft of each of these sequences."""
        for seq, token in zip(sequences, tokens):
            path = self._paths.get(seq)
            if path is not None:
                del self._masks[seq]
                if path.accept(token):
                    self._look(seq)

    def _look(self, seq: Seq) -> None:
        path = self._paths[seq]
        mask_X = path.next_mask()
        if not path.complete and mask_X.any():
            self._masks[seq] = mask_X


def within(drafts: Drafts, constraint: Constraint, limit: int) -> Drafts:
    """The drafts that a form allows, but the one that ends it, behind which nothing is sampled. A chain goes on with
    what the form forces, before, between or behind its tokens.

    Args:
        limit: most drafts.
    """
    return _chain(drafts, constraint, limit) if drafts.is_chain else _pruned(drafts, constraint)


def _chain(drafts: Drafts, constraint: Constraint, limit: int) -> Drafts:
    path, found, left = constraint.fork(), list[int](), list(drafts.tokens)
    while len(found) < limit:
        # Where the form leaves no choice, it knows better than the drafter, whose tokens count as far as they agree.
        expected = path.expected()
        coming = expected or left[:1]
        if not coming:
            break
        for token in coming:
            left = left[1:] if left[:1] == [token] else []
            if not path.accept(token) or path.complete:
                return Drafts.chain(found[:limit])
            found.append(token)
    return Drafts.chain(found[:limit])


def _pruned(drafts: Drafts, constraint: Constraint) -> Drafts:
    kept: dict[int, int] = {-1: -1}
    after: dict[int, Constraint] = {-1: constraint}
    for node, (token, parent) in enumerate(zip(drafts.tokens, drafts.parents)):
        if parent in kept:
            path = after[parent].fork()
            if path.accept(token) and not path.complete:
                kept[node], after[node] = len(kept) - 1, path
    nodes = [node for node in kept if node >= 0]
    return Drafts(
        tuple(drafts.tokens[node] for node in nodes), tuple(kept[drafts.parents[node]] for node in nodes)
    )
