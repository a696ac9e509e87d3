"""What each token of a ragged batch sees, computed on the device once for all layers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tokens(NamedTuple):
    """int32 ``[T]`` each.

    Attributes:
        row_T: the row that owns the token.
        length_T: slots of that row's context up to its own, which is included; 0 for padding. It sees no later ones.
        solid_T: how many slots it sees all of: ``length_T``, but for a token of a tree those before the tree.
    """

    row_T: jax.Array
    length_T: jax.Array
    solid_T: jax.Array


def tokens_of(
    T: int, query_start_Q: jax.Array, context_len_R: jax.Array, ancestors_TU: jax.Array | None = None
) -> Tokens:
    """What the tokens of a ragged batch see, with tree masks or without; see ``ragged_paged_attention``."""
    token_T = jnp.arange(T, dtype=jnp.int32)
    R = context_len_R.shape[0]
    row_T = jnp.searchsorted(query_start_Q[1:], token_T, side="right", method="compare_all").astype(jnp.int32)
    owned_T = row_T < R
    row_T = jnp.where(owned_T, row_T, 0)
    length_T = context_len_R[row_T] - query_start_Q[row_T + 1] + token_T + 1
    length_T = jnp.where(owned_T, length_T, 0)
    if ancestors_TU is None:
        return Tokens(row_T, length_T, length_T)
    prefix_T = length_T - 1 - (token_T - query_start_Q[row_T])
    tree_T = (ancestors_TU != 0).any(-1) & owned_T
    return Tokens(row_T, length_T, jnp.where(tree_T, prefix_T, length_T))
