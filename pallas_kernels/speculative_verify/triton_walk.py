"""Kernels of verification: the walk down each tree, and the residual masses at its end. See ``xla`` for the numbers."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.sampling.triton_rows import GROUP, load_tokens

State = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Laws:
    """References to logits and their laws, as a kernel gets them."""

    logits_NV: Any
    token_N: Any
    max_N: Any
    temperature_N: Any
    threshold_N: Any
    mass_N: Any

    def probability(self, node: jax.Array, id_X: jax.Array) -> jax.Array:
        """Probability of tokens at a node; 0 beyond the vocabulary."""
        logits_X = load_tokens(self.logits_NV, node, id_X)
        temperature = plgpu.load(self.temperature_N.at[node])
        greedy = temperature == 0
        scaled_X = (logits_X - plgpu.load(self.max_N.at[node])) / jnp.where(greedy, 1.0, temperature)
        weight_X = jnp.exp(scaled_X) / plgpu.load(self.mass_N.at[node])
        weight_X = jnp.where(logits_X >= plgpu.load(self.threshold_N.at[node]), weight_X, 0.0)
        chosen_X = (id_X == plgpu.load(self.token_N.at[node])).astype(jnp.float32)
        return jnp.where(greedy, chosen_X, weight_X)


@dataclass(frozen=True)
class Tree:
    """A row's tree, as its program reads it; nodes are indices within the row."""

    target: Laws
    draft: Laws | None
    healthy_N: Any
    draft_token_N: Any
    accept_uniform_N: Any
    start: jax.Array
    nodes: jax.Array
    parent_D: jax.Array
    tile: int

    def next_child(self, current: jax.Array, after: jax.Array) -> jax.Array:
        """First child of a node after another; the number of nodes if there is none."""
        index_D = jnp.arange(self.parent_D.shape[0])
        healthy = plgpu.load(self.healthy_N.at[self.start + current])
        child_D = (self.parent_D == current) & (index_D > after) & (index_D < self.nodes) & healthy
        return jnp.min(jnp.where(child_D, index_D, self.nodes))

    def try_child(self, state: State) -> State:
        """Accepts or rejects the child of the state, which is (current node, child to try, c, mass that is left of p,
        mass of q that is gone, accepted drafts, path)."""
        current, child, factor, left, gone, count, path_D = state
        V = self.target.logits_NV.shape[1]
        node, child_node = self.start + current, self.start + child
        x = jnp.clip(plgpu.load(self.draft_token_N.at[child_node]), 0, V - 1)
        p = self.target.probability(node, x)
        q, step = jnp.ones_like(p), left
        if self.draft is not None:
            q = self.draft.probability(node, x)
            step = left / jnp.maximum(1 - gone, 1e-30)
            p = jnp.maximum(p - factor * q, 0.0)
        accepted = plgpu.load(self.accept_uniform_N.at[child_node]) * step * q < p
        following = self.next_child(jnp.where(accepted, child, current), child)
        rest = jnp.maximum(left - p, 0.0)
        if self.draft is not None:
            # Only a further child after a rejection needs the mass that is left.
            again = ~accepted & (following < self.nodes)
            rest = self._left(node, factor + step, again.astype(jnp.int32) * pl.cdiv(V, self.tile))
        return (
            jnp.where(accepted, child, current),
            following,
            jnp.where(accepted, 0.0, factor + step),
            jnp.where(accepted, 1.0, rest),
            jnp.where(accepted, 0.0, gone + q),
            count + accepted.astype(jnp.int32),
            jnp.where((jnp.arange(path_D.shape[0]) == count) & accepted, child_node, path_D),
        )

    def _left(self, node: jax.Array, factor: jax.Array, tiles: jax.Array) -> jax.Array:
        """Mass of ``max(0, p - c * q)`` over so many tiles of the vocabulary."""
        assert self.draft is not None
        draft = self.draft

        def add(i: jax.Array, sum_X: jax.Array) -> jax.Array:
            id_X = i * self.tile + jnp.arange(self.tile)
            q_X = draft.probability(node, id_X)
            return sum_X + jnp.maximum(self.target.probability(node, id_X) - factor * q_X, 0.0)

        return jnp.sum(lax.fori_loop(0, tiles, add, jnp.zeros(self.tile)))


def walk_kernel(*refs: Any, sampled: bool, tile: int) -> None:
    """The path of a row. A row that ends with rejections at a random node needs a draw from its residual law there.

    Args:
        refs: six of the target's laws; six of the draft's if ``sampled``; healthy_N, draft_token_N, parent_N,
            node_start_Q, accept_uniform_N; outputs count_R, path_RD (power-of-two width, at least the nodes of a row),
            last_R, factor_R, needed_R.
        tile: tokens that a pass over the vocabulary reads at a time.
    """
    target, draft, rest = split_laws(refs, sampled)
    healthy_N, draft_token_N, parent_N, node_start_Q, accept_uniform_N, *outputs = rest
    count_R, path_RD, last_R, factor_R, needed_R = outputs
    N = parent_N.shape[0]
    row = pl.program_id(0)
    start = plgpu.load(node_start_Q.at[row])
    nodes = plgpu.load(node_start_Q.at[row + 1]) - start
    index_D = jnp.arange(path_RD.shape[1])
    at_D = jnp.minimum(start + index_D, N - 1)
    parent_D = plgpu.load(parent_N.at[at_D], mask=index_D < nodes, other=-1)
    start = jnp.minimum(start, N - 1)  # a row without nodes may start after the last one
    tree = Tree(target, draft, healthy_N, draft_token_N, accept_uniform_N, start, nodes, parent_D, tile)
    zero = nodes * 0
    nothing = zero.astype(jnp.float32)
    state: State = (zero, tree.next_child(zero, zero), nothing, nothing + 1, nothing, zero, index_D * 0 - 1)
    current, _, factor, _, _, count, path_D = lax.while_loop(lambda s: s[1] < nodes, tree.try_child, state)
    last = start + current
    plgpu.store(count_R.at[row], count)
    plgpu.store(path_RD.at[row, index_D], path_D)
    plgpu.store(last_R.at[row], last)
    plgpu.store(factor_R.at[row], factor)
    # Every rejection adds a positive step: the mass that is left, which is rarely 0 and then leaves nothing to draw.
    random = plgpu.load(target.temperature_N.at[last]) > 0
    plgpu.store(needed_R.at[row], (random & (factor > 0)).astype(jnp.int32))


def residual_kernel(*refs: Any, sampled: bool, groups: int) -> None:
    """Residual mass of each group of a tile of the vocabulary, for the rows that need it.

    Args:
        refs: the laws as in ``walk_kernel``; draft_token_N, parent_N, node_start_Q, last_R, factor_R, needed_R; output
            mass_RG.
    """
    target, draft, rest = split_laws(refs, sampled)
    *shared, last_R, factor_R, needed_R, mass_RG = rest
    row, tile = pl.program_id(0), pl.program_id(1)

    @pl.when(plgpu.load(needed_R.at[row]) > 0)
    def _() -> None:
        group_B = tile * groups + jnp.arange(groups)
        id_BJ = group_B[:, None] * GROUP + jnp.arange(GROUP)[None, :]
        last, factor = plgpu.load(last_R.at[row]), plgpu.load(factor_R.at[row])
        weight_BJ = residual(target, draft, shared, row, last, factor, id_BJ)
        plgpu.store(mass_RG.at[row, group_B], jnp.sum(weight_BJ, axis=1))


def residual(
    target: Laws,
    draft: Laws | None,
    shared: list[Any],
    row: jax.Array,
    last: jax.Array,
    factor: jax.Array,
    id_X: jax.Array,
) -> jax.Array:
    """Weight of tokens in the residual law at the end of a path, where all children of node ``last`` were rejected.

    Args:
        shared: references to draft_token_N, parent_N, node_start_Q.
    """
    p_X = target.probability(last, id_X)
    if draft is not None:
        return jnp.maximum(p_X - factor * draft.probability(last, id_X), 0.0)
    draft_token_N, parent_N, node_start_Q = shared
    start = plgpu.load(node_start_Q.at[row])

    def exclude(node: jax.Array, p_X: jax.Array) -> jax.Array:
        child = plgpu.load(parent_N.at[node]) == last - start
        return jnp.where(child & (id_X == plgpu.load(draft_token_N.at[node])), 0.0, p_X)

    return lax.fori_loop(last + 1, plgpu.load(node_start_Q.at[row + 1]), exclude, p_X)


def split_laws(refs: tuple[Any, ...], sampled: bool) -> tuple[Laws, Any, list[Any]]:
    """The target's laws, the draft's (None without them), and the other references."""
    target, refs = Laws(*refs[:6]), refs[6:]
    draft = Laws(*refs[:6]) if sampled else None
    return target, draft, list(refs[6:] if sampled else refs)
