"""Verification of drafted tokens in XLA, on any device: all rows try one child of their current node at a time.

After rejections the law of a node is ``max(0, p - c * q)`` up to scale, where c grows with every rejection, because
``max(0, max(0, p - a q) - b q) = max(0, p - (a + b) q)`` (a rejected token has nothing left of its probability, so it
does not matter that q loses it). So a walk keeps three numbers per row and no law: c, the mass that is left of p, and
the mass of q that its rejected tokens had.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import register_dataclass

from pallas_kernels.gpus import Generation
from pallas_kernels.sampling.reference import Draws
from pallas_kernels.sampling.xla_sums import GROUP, pick, split_groups, take_group, total
from pallas_kernels.speculative_verify.reference import Verified, check_drafts, packed_parents


@register_dataclass
@dataclass(frozen=True)
class Walk:
    """Where R rows are.

    Attributes:
        current_R: node whose children are tried.
        child_R: the child to try next; N if there is none.
        tried_R: whether a child of the current node was rejected.
        factor_R: c.
        left_R: mass of ``max(0, p - c * q)``.
        gone_R: mass that the rejected tokens have in q.
        count_R, path_RD: result.
    """

    current_R: jax.Array
    child_R: jax.Array
    tried_R: jax.Array
    factor_R: jax.Array
    left_R: jax.Array
    gone_R: jax.Array
    count_R: jax.Array
    path_RD: jax.Array


def supports(
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
    generation: Generation = "hopper",
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    for logits in (logits_NV, draft_logits_NV):
        if logits is not None and not jnp.issubdtype(logits.dtype, jnp.floating):
            return False, f"logits are {logits.dtype}; they must be of a float type"
    return True, ""


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
    """See ``reference.speculative_verify``."""
    check_drafts(draft_logits_NV, draft)
    N, V = logits_NV.shape
    trees = Trees(
        target=Laws(logits_NV, target),
        draft=None if draft_logits_NV is None or draft is None else Laws(draft_logits_NV, draft),
        token_N=jnp.clip(draft_token_N, 0, V - 1),
        parent_N=packed_parents(parent_N, node_start_Q)[1],
        accept_uniform_N=accept_uniform_N,
    )
    root_R = jnp.minimum(node_start_Q[:-1], N - 1)
    filled_R = node_start_Q[1:] > node_start_Q[:-1]
    zero_R = jnp.zeros(root_R.shape, jnp.float32)
    walk = Walk(
        current_R=root_R,
        child_R=jnp.where(filled_R, trees.next_child(root_R, root_R), N),
        tried_R=jnp.zeros(root_R.shape, bool),
        factor_R=zero_R,
        left_R=zero_R + 1,
        gone_R=zero_R,
        count_R=jnp.zeros(root_R.shape, jnp.int32),
        path_RD=jnp.full((root_R.shape[0], max_nodes - 1), -1, jnp.int32),
    )
    walk = lax.while_loop(lambda walk: (walk.child_R < N).any(), trees.try_child, walk)
    bonus_R = target.token_P[walk.current_R]
    drawn_R, mass_R = lax.cond(
        walk.tried_R.any(),
        lambda: _draw(trees.residual(walk, None), residual_uniform_R),
        lambda: (bonus_R, zero_R),
    )
    random_R = walk.tried_R & (target.temperature_P[walk.current_R] > 0) & (mass_R > 0)
    next_R = jnp.where(filled_R, jnp.where(random_R, drawn_R, bonus_R), 0)
    return Verified(walk.count_R, walk.path_RD, next_R)


@dataclass(frozen=True)
class Laws:
    """Logits of nodes and their laws."""

    logits_NV: jax.Array
    draws: Draws

    def probability(self, node_R: jax.Array, id_R1: jax.Array | None) -> jax.Array:
        """Probability of one token per row at its node, [R, 1], or of the whole vocabulary, [R, V]."""
        if id_R1 is None:
            id_RX = jnp.arange(self.logits_NV.shape[1], dtype=jnp.int32)[None, :]
            logits_RX = self.logits_NV[node_R].astype(jnp.float32)
        else:
            id_RX, logits_RX = id_R1, self.logits_NV[node_R[:, None], id_R1].astype(jnp.float32)
        laws = jax.tree.map(lambda x_N: x_N[node_R][:, None], self.draws)
        greedy_R1 = laws.temperature_P == 0
        weight_RX = (
            jnp.exp((logits_RX - laws.max_P) / jnp.where(greedy_R1, 1.0, laws.temperature_P)) / laws.mass_P
        )
        weight_RX = jnp.where(logits_RX >= laws.threshold_P, weight_RX, 0.0)
        return jnp.where(greedy_R1, (id_RX == laws.token_P).astype(jnp.float32), weight_RX)


@dataclass(frozen=True)
class Trees:
    """What a walk reads: laws of the nodes, the draft's None if drafts are deterministic; drafted tokens; packed
    indices of the parents; a number for each trial."""

    target: Laws
    draft: Laws | None
    token_N: jax.Array
    parent_N: jax.Array
    accept_uniform_N: jax.Array

    def next_child(self, current_R: jax.Array, after_R: jax.Array) -> jax.Array:
        """First child of the current nodes after a node; N if there is none."""
        N = self.parent_N.shape[0]
        node_N = jnp.arange(N, dtype=jnp.int32)
        here_RN = (self.parent_N == current_R[:, None]) & (node_N > after_R[:, None])
        here_RN &= self.target.draws.healthy_P[current_R][:, None]
        return jnp.where(here_RN, node_N, N).min(-1)

    def residual(self, walk: Walk, id_R1: jax.Array | None) -> jax.Array:
        """What rejections left of ``p`` at the current nodes, for one token per row or for the whole vocabulary."""
        p_RX = self.target.probability(walk.current_R, id_R1)
        if self.draft is not None:
            q_RX = self.draft.probability(walk.current_R, id_R1)
            return jnp.maximum(p_RX - walk.factor_R[:, None] * q_RX, 0.0)
        tried_RN = self.parent_N == walk.current_R[:, None]
        tried_RN &= jnp.arange(self.parent_N.shape[0]) < walk.child_R[:, None]
        if id_R1 is not None:
            gone_RX = ((id_R1 == self.token_N) & tried_RN).any(-1, keepdims=True)
        else:
            R, V = p_RX.shape
            place_RN = jnp.where(tried_RN, self.token_N, V)
            gone_RX = jnp.zeros((R, V), bool).at[jnp.arange(R)[:, None], place_RN].set(True, mode="drop")
        return jnp.where(gone_RX, 0.0, p_RX)

    def try_child(self, walk: Walk) -> Walk:
        """Every row with a child left accepts or rejects it."""
        N = self.parent_N.shape[0]
        active_R = walk.child_R < N
        child_R = jnp.minimum(walk.child_R, N - 1)
        id_R1 = self.token_N[child_R][:, None]
        p_R = self.residual(walk, id_R1)[:, 0]
        if self.draft is None:
            q_R, step_R = jnp.ones_like(p_R), walk.left_R
        else:
            q_R = self.draft.probability(walk.current_R, id_R1)[:, 0]
            step_R = walk.left_R / jnp.maximum(1 - walk.gone_R, 1e-30)
        accepted_R = active_R & (self.accept_uniform_N[child_R] * step_R * q_R < p_R)
        moved = Walk(
            current_R=child_R,
            child_R=self.next_child(child_R, child_R),
            tried_R=jnp.zeros_like(walk.tried_R),
            factor_R=jnp.zeros_like(p_R),
            left_R=jnp.ones_like(p_R),
            gone_R=jnp.zeros_like(p_R),
            count_R=walk.count_R + 1,
            path_RD=jnp.where(
                jnp.arange(walk.path_RD.shape[1]) == walk.count_R[:, None], child_R[:, None], walk.path_RD
            ),
        )
        stayed = replace(
            walk,
            child_R=self.next_child(walk.current_R, child_R),
            tried_R=jnp.ones_like(walk.tried_R),
            factor_R=walk.factor_R + step_R,
            left_R=jnp.maximum(walk.left_R - p_R, 0.0),
            gone_R=walk.gone_R + q_R,
        )
        rejected_R = active_R & ~accepted_R
        if self.draft is not None:
            # Only a further child needs the mass that is left.
            again = (rejected_R & (stayed.child_R < N)).any()
            left_R = lax.cond(again, lambda: total(self.residual(stayed, None)), lambda: stayed.left_R)
            stayed = replace(stayed, left_R=left_R)
        return _select(accepted_R, moved, _select(rejected_R, stayed, walk))


def _draw(mass_RV: jax.Array, uniform_R: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inverse CDF in token-id order, and the total mass."""
    mass_RGJ = split_groups(mass_RV, 0.0)
    mass_RG = total(mass_RGJ)
    mass_R = total(mass_RG)
    group_R, rest_R = pick(mass_RG, uniform_R * mass_R)
    return group_R * GROUP + pick(take_group(mass_RGJ, group_R), rest_R)[0], mass_R


def _select(mask_R: jax.Array, yes: Walk, no: Walk) -> Walk:
    """Row by row."""
    return jax.tree.map(lambda a, b: jnp.where(mask_R.reshape((-1,) + (1,) * (a.ndim - 1)), a, b), yes, no)
