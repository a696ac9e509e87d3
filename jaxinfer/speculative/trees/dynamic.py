"""EAGLE-2's dynamic trees (Li et al. 2024, arXiv:2406.16858).

Depth by depth the most probable drafts are expanded, where the probability of a draft is that of the whole path to it
under the draft head. At the end the most probable of *all* candidates are kept, expanded or not. A path is never more
probable than its beginning, so what is kept is a tree.

All functions are pure, work on R sequences at once, and have static shapes, so a draft loop can be one program:

    candidates = start(*top(logits of the root))
    for each further depth:
        index_RB = frontier(candidates, B, of=number of candidates of the last depth)
        ... run the head on the candidates index_RB ...
        candidates = grow(candidates, index_RB, *top(logits_RBV))
    tree = rerank(candidates, N)
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from jaxinfer.drafts import ROOT, Drafts

NO_TOKEN = -1


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


def top(logits_XV: jax.Array, count: int, vocab_map: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The most probable tokens of a law, int32, and their log-probabilities, float32, both ``[..., count]``.

    Args:
        logits_XV: ``[..., V]``.
        vocab_map: as ``DraftHead.vocab_map``.
    """
    logprob_XV = jax.nn.log_softmax(logits_XV.astype(jnp.float32), axis=-1)
    value, token = jax.lax.top_k(logprob_XV, count)
    return token if vocab_map is None else vocab_map[token], value


def start(token_RX: jax.Array, logprob_RX: jax.Array) -> Candidates:
    """The drafts that may follow the root."""
    return Candidates(
        token_RX.astype(jnp.int32), jnp.full(token_RX.shape, ROOT, jnp.int32), logprob_RX.astype(jnp.float32)
    )


def frontier(candidates: Candidates, width: int, *, of: int) -> jax.Array:
    """The ``width`` best of the last ``of`` candidates: int32 ``[R, width]``, indices of candidates, best first."""
    first = candidates.score_RC.shape[1] - of
    _, index_RB = jax.lax.top_k(candidates.score_RC[:, first:], width)
    return index_RB.astype(jnp.int32) + first


def grow(
    candidates: Candidates, index_RB: jax.Array, token_RBX: jax.Array, logprob_RBX: jax.Array
) -> Candidates:
    """Adds the X best tokens behind each of B candidates.

    Args:
        index_RB: the candidates that were expanded.
        token_RBX, logprob_RBX: what may follow them, and its log-probability given the path.
    """
    R, B, X = token_RBX.shape
    # Rounding may give log-probabilities above 0, which would put a child before its parent.
    before_RB1 = jnp.take_along_axis(candidates.score_RC, index_RB, axis=1)[..., None]
    score_RBX = before_RB1 + jnp.minimum(logprob_RBX, 0.0)
    parent_RBX = jnp.broadcast_to(index_RB[..., None], (R, B, X))

    def joined(old_RC: jax.Array, new_RBX: jax.Array) -> jax.Array:
        return jnp.concatenate([old_RC, new_RBX.reshape(R, B * X).astype(old_RC.dtype)], axis=1)

    return Candidates(
        joined(candidates.token_RC, token_RBX),
        joined(candidates.parent_RC, parent_RBX),
        joined(candidates.score_RC, score_RBX),
    )


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
