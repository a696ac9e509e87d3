"""Acceptance rules that change the law of the output. Nothing uses them unless a configuration says so."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxinfer.drafts import ROOT, Drafts


def lossy_typical_acceptance(
    probability_NV: jax.Array, draft_token_N: jax.Array, *, epsilon: float, delta: float
) -> jax.Array:
    """Medusa's typical acceptance: a draft that is probable *enough* counts (Cai et al. 2024, arXiv:2401.10774).

    A draft x counts where ``p(x) > min(epsilon, delta * exp(-H(p)))`` with H the entropy in nats: the more open the
    law, the less probable a draft may be. The output does not follow the target's law.

    Args:
        probability_NV: the target's processed laws, each at the place of the draft beside it (behind its parent).
        draft_token_N: int32.
        epsilon: in [0, 1], the highest bar; the paper takes 0.09 and 0.3 for delta.

    Returns:
        bool ``[N]``.
    """
    p_NV = probability_NV.astype(jnp.float32)
    entropy_N = -jnp.sum(jnp.where(p_NV > 0, p_NV * jnp.log(jnp.where(p_NV > 0, p_NV, 1.0)), 0.0), axis=-1)
    bar_N = jnp.minimum(epsilon, delta * jnp.exp(-entropy_N))
    p_N = jnp.take_along_axis(p_NV, draft_token_N[:, None], axis=-1)[:, 0]
    return p_N > bar_N


def longest_accepted_path(tree: Drafts, accepted: Sequence[bool]) -> tuple[int, ...]:
    """Indices of the drafts on the longest path from the root of which all are accepted; the first of equals."""
    best: tuple[int, ...] = ()
    reached = {ROOT}
    for i, parent in enumerate(tree.parents):
        if accepted[i] and parent in reached:
            reached.add(i)
            path = tree.path(i)
            if len(path) > len(best):
                best = path
    return best
