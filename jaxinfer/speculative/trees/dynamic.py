"""EAGLE-2's dynamic trees (Li et al. 2024, arXiv:2406.16858).

Depth by depth the most probable drafts are expanded, where the probability of a draft is that of the whole path to it
under the draft head. At the end the most probable of *all* candidates are kept, expanded or not. A path is never more
probable than its beginning, so what is kept is a tree.

All functions are pure, work on R sequences at once, and have one shape for all levels:

    growing = nothing_grown(R, shape, U)
    for level in range(shape.depth):
        ... run the head on the drafts that the level before chose (at level 0: on the newest tokens) ...
        growing = grow(growing, *top(logits_RBV, shape.width), level)
    tree = rerank(growing.candidates, N)
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from jaxinfer.drafts import ROOT, Drafts

NO_TOKEN = -1


@dataclass(frozen=True)
class TreeShape:
    """How a tree grows.

    Attributes:
        depth: levels; the drafts of the last one are not expanded.
        width: B, drafts that are expanded at each level, and the guesses behind each of them.
    """

    depth: int
    width: int

    @property
    def expanded(self) -> int:
        """Drafts that the head runs on."""
        return (self.depth - 1) * self.width

    @property
    def candidates(self) -> int:
        """C."""
        return self.depth * self.width**2


@register_dataclass
@dataclass(frozen=True)
class Candidates:
    """All drafts that were considered, C of each sequence, parents before children.

    Attributes:
        token_RC: int32.
        parent_RC: int32, index of the candidate before, or ``ROOT``.
        score_RC: float32, log-probability of the path from the root; -inf for a candidate that may not be used.
    """

    token_RC: jax.Array
    parent_RC: jax.Array
    score_RC: jax.Array


@register_dataclass
@dataclass(frozen=True)
class Growing:
    """Trees that grow. The drafts that are expanded are *nodes*, numbered from 0 on, ``width`` of each level.

    Attributes:
        frontier_RB: int32, the candidates that are nodes of the last level; ``ROOT`` before the first one.
        token_RN: int32, token of each node; what lies behind the last level may be anything.
        parent_RN: int32, node before each node, or ``ROOT``.
        words_RNU: int32, tree mask of each node: it sees the newest token (bit 0), the nodes before it and itself
            (node n is bit n + 1).
    """

    candidates: Candidates
    frontier_RB: jax.Array
    token_RN: jax.Array
    parent_RN: jax.Array
    words_RNU: jax.Array


@register_dataclass
@dataclass(frozen=True)
class Reranked:
    """The N best candidates of each sequence, parents before children.

    Attributes:
        token_RN: int32, ``NO_TOKEN`` behind the last draft of a sequence.
        parent_RN: int32, index among the N, or ``ROOT``.
        count_R: int32, drafts of each sequence.
    """

    token_RN: jax.Array
    parent_RN: jax.Array
    count_R: jax.Array


def top(logits_XV: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The most probable tokens of a law, int32, and their log-probabilities, float32, both ``[..., count]``."""
    logprob_XV = jax.nn.log_softmax(logits_XV.astype(jnp.float32), axis=-1)
    value, token = jax.lax.top_k(logprob_XV, count)
    return token, value


def nothing_grown(rows: int, shape: TreeShape, words: int) -> Growing:
    """Trees without drafts.

    Args:
        words: U, at least what ``1 + shape.depth * shape.width`` bits take.
    """
    R, C, B, N = rows, shape.candidates, shape.width, shape.depth * shape.width

    def filled(value: float, *dims: int) -> jax.Array:
        return jnp.full((R, *dims), value, jnp.int32)

    return Growing(
        Candidates(filled(0, C), filled(ROOT, C), jnp.full((R, C), -jnp.inf, jnp.float32)),
        filled(ROOT, B),
        filled(0, N),
        filled(ROOT, N),
        filled(0, N, words),
    )


def grow(growing: Growing, token_RBX: jax.Array, logprob_RBX: jax.Array, level: jax.Array) -> Growing:
    """Adds the guesses behind the nodes of the last level, and makes the most probable of them the next nodes.

    Args:
        token_RBX: at level 0 only the first of the B rows counts, and the others have to be improbable.
        logprob_RBX: log-probability of each guess given its path; -inf where there is none.
        level: int32, from 0 on.
    """
    R, B, X = token_RBX.shape
    old, first = growing.candidates, level * B * X
    frontier_RB = growing.frontier_RB
    before_RB = jnp.where(
        frontier_RB == ROOT, 0.0, jnp.take_along_axis(old.score_RC, jnp.maximum(frontier_RB, 0), axis=1)
    )
    # Rounding may give log-probabilities above 0, which would put a child before its parent.
    score_RBX = before_RB[..., None] + jnp.minimum(logprob_RBX, 0.0)
    parent_RBX = jnp.broadcast_to(frontier_RB[..., None], (R, B, X))
    candidates = Candidates(
        _put(old.token_RC, token_RBX.reshape(R, -1), first),
        _put(old.parent_RC, parent_RBX.reshape(R, -1), first),
        _put(old.score_RC, score_RBX.reshape(R, -1), first),
    )
    _, best_RB = jax.lax.top_k(score_RBX.reshape(R, -1), B)
    node_RB = jnp.where(level == 0, ROOT, (level - 1) * B + best_RB // X)
    return Growing(
        candidates,
        (best_RB + first).astype(jnp.int32),
        _put(growing.token_RN, jnp.take_along_axis(token_RBX.reshape(R, -1), best_RB, axis=1), level * B),
        _put(growing.parent_RN, node_RB, level * B),
        _put(growing.words_RNU, _words(growing.words_RNU, node_RB, level), level * B),
    )


def _words(words_RNU: jax.Array, parent_RB: jax.Array, level: jax.Array) -> jax.Array:
    """Masks of the nodes of a level: those of their parents, and themselves."""
    B, U = parent_RB.shape[1], words_RNU.shape[2]
    bit_B = 1 + level * B + jnp.arange(B)
    word_U = jnp.arange(U)
    root_U = (word_U == 0).astype(jnp.int32)
    before_RBU = jnp.take_along_axis(words_RNU, jnp.maximum(parent_RB, 0)[..., None], axis=1)
    before_RBU = jnp.where(parent_RB[..., None] == ROOT, root_U, before_RBU)
    own_BU = jnp.where(word_U == bit_B[:, None] // 32, 1 << (bit_B[:, None] % 32), 0)
    return before_RBU | own_BU.astype(jnp.int32)


def _put(array_RX: jax.Array, new_RX: jax.Array, first: jax.Array) -> jax.Array:
    at = (jnp.int32(0), first.astype(jnp.int32), *(jnp.int32(0) for _ in array_RX.shape[2:]))
    return jax.lax.dynamic_update_slice(array_RX, new_RX.astype(array_RX.dtype), at)


def rerank(candidates: Candidates, size: int, limit_R: jax.Array | None = None) -> Reranked:
    """Keeps the most probable candidates.

    Args:
        size: N, at most C.
        limit_R: int32, most drafts of each sequence; default: N.
    """
    # No score exceeds its parent's, and a stable order puts a parent before children of the same score: what is best is
    # a tree.
    score_RC = candidates.score_RC
    order_RC = jnp.argsort(-score_RC, axis=1, stable=True)
    rank_RC = jnp.argsort(order_RC, axis=1)
    limit_R1 = size if limit_R is None else jnp.minimum(limit_R, size)[:, None]
    kept_RC = (rank_RC < limit_R1) & (score_RC > -jnp.inf)
    place_RC = jnp.where(kept_RC, jnp.cumsum(kept_RC, axis=1) - 1, ROOT)
    parent_RC = jnp.where(
        candidates.parent_RC == ROOT,
        ROOT,
        jnp.take_along_axis(place_RC, jnp.maximum(candidates.parent_RC, 0), axis=1),
    )
    target_RC = jnp.where(kept_RC, place_RC, size)

    def packed(values_RC: jax.Array, fill: int) -> jax.Array:
        empty_RN = jnp.full((values_RC.shape[0], size), fill, jnp.int32)
        row_R1 = jnp.arange(values_RC.shape[0])[:, None]
        return empty_RN.at[row_R1, target_RC].set(values_RC.astype(jnp.int32), mode="drop")

    return Reranked(
        packed(candidates.token_RC, NO_TOKEN),
        packed(parent_RC, ROOT),
        kept_RC.sum(axis=1).astype(jnp.int32),
    )


def trees_of(reranked: Reranked) -> list[Drafts]:
    """The trees on the host; fetches them from the device."""
    token_RN, parent_RN = np.asarray(reranked.token_RN), np.asarray(reranked.parent_RN)
    counts = np.asarray(reranked.count_R)
    return [
        Drafts(tuple(map(int, tokens[:n])), tuple(map(int, parents[:n])))
        for tokens, parents, n in zip(token_RN, parent_RN, counts)
    ]
