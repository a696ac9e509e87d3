"""Verification of drafted tokens: the semantics, in plain jnp and float32. Slow; used by tests."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import register_dataclass

from pallas_kernels.sampling.reference import Draws


@register_dataclass
@dataclass(frozen=True)
class Verified:
    """What R sequences emit in a step: the drafts on the path, then one more token.

    Attributes:
        accepted_count_R: int32, number of accepted drafts.
        path_RD: int32 [R, max_nodes - 1], packed indices of the accepted nodes, in order; -1 after them.
        next_token_R: int32, the token after the accepted ones: from the residual law where drafts were rejected, else
            the target's own token (the bonus). 0 for a row without nodes.
    """

    accepted_count_R: jax.Array
    path_RD: jax.Array
    next_token_R: jax.Array


def speculative_verify(
    logits_NV: jax.Array,
    target: Draws,
    draft_token_N: jax.Array,
    parent_N: jax.Array,
    node_start_Q: jax.Array,
    accept_uniform_N: jax.Array,
    residual_uniform_R: jax.Array,
    draft_logits_NV: jax.Array | None = None,
    draft: Draws | None = None,
    *,
    max_nodes: int,
) -> Verified:
    """Accepts a path of drafts and samples the next token, so that what is emitted follows the target's law exactly.

    Each row is a tree of nodes: its root is the last token that is already part of the sequence, the others are drafts.
    A chain is a tree with one child per node. ``logits_NV[n]`` is what the target says after node n. With ``p`` the
    target's processed law at a node and ``q`` the draft's, the children x of a node are tried in order:

    1. accept x if ``u * q(x) < p(x)``, and go on with the children of x;
    2. else ``p`` becomes ``max(0, p - q)`` and ``q`` loses x, both renormalised, and the next child is tried.

    When no child is left, the next token is drawn from what ``p`` has become. Each trial and the draw have numbers of
    their own. For one child this is speculative sampling (Leviathan et al. 2023, Chen et al. 2023); for more it is
    SpecInfer's multi-step sampling (Miao et al. 2024) with children drawn without replacement, as in EAGLE (Li et al.
    2024) and recursive speculative decoding (Jeon et al. 2024). Induction over the children shows that it is exact: a
    trial emits x with ``min(p(x), q(x))``, and the rest of ``p`` is what the next trial emits from.

    Without draft laws the drafts are deterministic (n-grams, best tokens of a draft head): each has ``q(x) = 1``, so
    that x is accepted with its probability, and excluded from ``p`` where it is rejected. A greedy row of the target
    has all of ``p`` on its token: it accepts that token alone.

    Deterministic drafts can also be held against tokens that the target drew at each node before: pass a target whose
    temperatures are 0, but whose tokens were drawn at the real ones. The law is the same, and with one uniform number
    per position the tokens are those of sampling without drafts.

    Args:
        logits_NV: the target's logits of R rows of nodes, packed; row r owns ``node_start[r]:node_start[r + 1]``, its
            root first, parents before their children. Any float type. Nodes after the last row may hold anything.
        target: the laws of the nodes, as ``sampling.truncated_draw`` of these logits returns them. Its token is the
            bonus where a path ends without a rejection.
        draft_token_N: int32, token of each draft; those of one node's children differ. That of a root is not used.
        parent_N: int32, index of the parent within the row; -1 for a root.
        node_start_Q: int32 [R + 1]; a padded row has no nodes.
        accept_uniform_N: float32 in (0, 1), of each trial.
        residual_uniform_R: float32 in (0, 1), of the draw after rejections.
        draft_logits_NV, draft: the draft's logits at each node and their laws, from which the children of the node were
            drawn in order and without replacement. The laws must be healthy where a node has children. Both or none.
        max_nodes: largest number of nodes of a row, its root included.

    Returns:
        What a row gets depends on that row alone. At a node that is not healthy a path ends with token 0.

    Raises:
        ValueError: one of ``draft_logits_NV`` and ``draft`` is missing.
    """
    check_drafts(draft_logits_NV, draft)
    N, V = logits_NV.shape
    R = node_start_Q.shape[0] - 1
    row_N, parent_N = packed_parents(parent_N, node_start_Q)
    p_NV = probabilities(logits_NV, target)
    q_NV = p_NV if draft_logits_NV is None or draft is None else probabilities(draft_logits_NV, draft)

    def visit(
        walk: tuple[jax.Array, ...], n: jax.Array
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        current, p_V, q_V, touched = walk
        x = jnp.clip(draft_token_N[n], 0, V - 1)
        offer_V = jax.nn.one_hot(x, V) if draft is None else q_V
        is_root = n == node_start_Q[row_N[n]]
        tried = ~is_root & (parent_N[n] == current) & target.healthy_P[current]
        accepted = tried & (accept_uniform_N[n] * offer_V[x] < p_V[x])
        rejected, moved = tried & ~accepted, is_root | accepted
        p_V = jnp.where(rejected, _normalised(jnp.maximum(p_V - offer_V, 0.0)), p_V)
        q_V = jnp.where(rejected, _normalised(q_V.at[x].set(0.0)), q_V)
        current = jnp.where(moved, n, current)
        p_V, q_V = jnp.where(moved, p_NV[n], p_V), jnp.where(moved, q_NV[n], q_V)
        touched = ~moved & (touched | rejected)
        token = jnp.where(
            touched & (p_V.sum() > 0), _draw(p_V, residual_uniform_R[row_N[n]]), target.token_P[current]
        )
        return (current, p_V, q_V, touched), (accepted, token)

    start: tuple[jax.Array, ...] = (jnp.int32(0), p_NV[0], q_NV[0], jnp.bool_(False))
    _, (accepted_N, token_N) = lax.scan(visit, start, jnp.arange(N, dtype=jnp.int32))
    count_R, path_RD = _paths(accepted_N, row_N, R, max_nodes)
    token_R = token_N[jnp.maximum(node_start_Q[1:] - 1, 0)]
    return Verified(count_R, path_RD, jnp.where(node_start_Q[1:] > node_start_Q[:-1], token_R, 0))


def check_drafts(draft_logits_NV: jax.Array | None, draft: Draws | None) -> None:
    """Raises ValueError unless both or none are given."""
    if (draft_logits_NV is None) != (draft is None):
        raise ValueError(
            "draft_logits_NV and draft belong together: give both, or none for deterministic drafts"
        )


def packed_parents(parent_N: jax.Array, node_start_Q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The row of each node, and the packed index of its parent; -1 for roots and for nodes after the last row."""
    node_N = jnp.arange(parent_N.shape[0], dtype=jnp.int32)
    R = node_start_Q.shape[0] - 1
    row_N = jnp.clip(jnp.searchsorted(node_start_Q, node_N, side="right") - 1, 0, R - 1).astype(jnp.int32)
    real_N = (parent_N >= 0) & (node_N < node_start_Q[R])
    return row_N, jnp.where(real_N, node_start_Q[row_N] + parent_N, -1)


def probabilities(logits_NV: jax.Array, laws: Draws) -> jax.Array:
    """The processed laws, [N, V]."""
    logits_NV = logits_NV.astype(jnp.float32)
    greedy_N1 = laws.temperature_P[:, None] == 0
    weight_NV = jnp.exp(
        (logits_NV - laws.max_P[:, None]) / jnp.where(greedy_N1, 1.0, laws.temperature_P[:, None])
    )
    weight_NV = jnp.where(logits_NV >= laws.threshold_P[:, None], weight_NV, 0.0)
    return jnp.where(
        greedy_N1, jax.nn.one_hot(laws.token_P, logits_NV.shape[1]), weight_NV / laws.mass_P[:, None]
    )


def _normalised(x_V: jax.Array) -> jax.Array:
    """Scaled to sum 1; 0 stays 0."""
    total = x_V.sum()
    return jnp.where(total > 0, x_V / total, 0.0)


def _draw(p_V: jax.Array, uniform: jax.Array) -> jax.Array:
    """Inverse CDF in token-id order."""
    prefix_V = jnp.cumsum(p_V)
    beyond_V = (p_V > 0) & (prefix_V > uniform * prefix_V[-1])
    last = p_V.shape[0] - 1 - jnp.argmax(p_V[::-1] > 0)
    return jnp.where(beyond_V.any(), jnp.argmax(beyond_V), last).astype(jnp.int32)


def _paths(accepted_N: jax.Array, row_N: jax.Array, R: int, max_nodes: int) -> tuple[jax.Array, jax.Array]:
    """Number of accepted nodes of each row, and their packed indices in order."""
    mine_RN = accepted_N & (row_N == jnp.arange(R)[:, None])
    depth_RN = jnp.where(mine_RN, jnp.cumsum(mine_RN, axis=1) - 1, max_nodes)
    node_N = jnp.arange(accepted_N.shape[0], dtype=jnp.int32)
    at_RND = depth_RN[:, :, None] == jnp.arange(max_nodes - 1)
    return mine_RN.sum(1, dtype=jnp.int32), jnp.where(at_RND, node_N[:, None], -1).max(1)
