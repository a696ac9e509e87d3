"""What each token of a ragged batch sees, computed on the device once for all layers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tokens(NamedTuple):
    """int32 ``[T]`` each.

    Attributes:
        row_T: the row that owns the token.
        length_T: how many slots of that row's context it sees, its own included; 0 for padding.
    """

    row_T: jax.Array
    length_T: jax.Array


def tokens_of(T: int, query_start_Q: jax.Array, context_len_R: jax.Array) -> Tokens:
    """Rows and causal lengths of the tokens of a ragged batch."""
    token_T = jnp.arange(T, dtype=jnp.int32)
    R = context_len_R.shape[0]
    row_T = jnp.searchsorted(query_start_Q[1:], token_T, side="right", method="compare_all").astype(jnp.int32)
    owned_T = row_T < R
    row_T = jnp.where(owned_T, row_T, 0)
    length_T = context_len_R[row_T] - query_start_Q[row_T + 1] + token_T + 1
    return Tokens(row_T, jnp.where(owned_T, length_T, 0))
