"""The jitted functions by which an EAGLE head grows trees; what the host knows of them are numbers of nodes only.

Trees have W rows, one of each sequence that drafts, in any order. Programs are compiled once per shape and process,
whatever the number of engines.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.packing import Packing
from jaxinfer.speculative.trees.dynamic import Growing, Reranked, grow, rerank, top


@partial(jax.jit, static_argnames="width")
def grow_trees(
    growing: Growing, logits_PV: jax.Array, place_P: jax.Array, level: jax.Array, *, width: int
) -> Growing:
    """Adds a level of drafts.

    Args:
        logits_PV: row i belongs to node ``place % width`` of the last level, in the tree of row ``place // width``. At
            level 0 a tree has one place, its first.
        place_P: int32; ``W * width`` for padding.
        level: int32, from 0 on.
    """
    W = growing.frontier_RB.shape[0]
    token_PX, logprob_PX = top(logits_PV, width)
    token_RX = jnp.zeros((W * width, width), jnp.int32).at[place_P].set(token_PX, mode="drop")
    logprob_RX = jnp.full((W * width, width), -jnp.inf).at[place_P].set(logprob_PX, mode="drop")
    shape = (W, width, width)
    return grow(growing, token_RX.reshape(shape), logprob_RX.reshape(shape), level)


@partial(jax.jit, static_argnames=("plan", "token_bucket"))
def fill_nodes(
    growing: Growing,
    packed: jax.Array,
    row_T: jax.Array,
    node_T: jax.Array,
    first_W: jax.Array,
    *,
    plan: CompilePlan,
    token_bucket: int,
) -> tuple[jax.Array, jax.Array]:
    """Puts the tokens and masks of nodes into a packed batch.

    Args:
        row_T, node_T: int32, tree and node of each token; node -1 for tokens that are no nodes.
        first_W: int32, where the tokens of each tree began in the pass before.

    Returns:
        The packed batch, and int32 [T], the index of the entry before each node in the pass before; -1 for the others.
    """
    batch = Packing.make(plan, token_bucket).unpack(packed)
    assert batch.ancestors_TU is not None, "the plan is one for trees"
    is_node_T, at_T = node_T >= 0, (row_T, jnp.maximum(node_T, 0))
    ids_T = jnp.where(is_node_T, growing.token_RN[at_T], batch.token_ids_T)
    words_TU = jnp.where(is_node_T[:, None], growing.words_RNU[at_T], batch.ancestors_TU)
    before_T = jnp.where(is_node_T, first_W[row_T] + 1 + growing.parent_RN[at_T], -1)
    # Tokens are the first of the packed arrays, masks the last.
    between = packed[token_bucket : packed.size - words_TU.size]
    return jnp.concatenate([ids_T, between, words_TU.reshape(-1)]), before_T


@partial(jax.jit, static_argnames="size")
def best_of(growing: Growing, limit_W: jax.Array, *, size: int) -> Reranked:
    """The most probable drafts of each tree, at most ``limit_W`` of them."""
    return rerank(growing.candidates, size, limit_W)
