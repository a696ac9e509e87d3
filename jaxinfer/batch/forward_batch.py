"""The device input of one step: a ragged batch of tokens, as a pytree."""

from dataclasses import dataclass

import jax
from jax.tree_util import register_dataclass


@register_dataclass
@dataclass(frozen=True)
class ForwardBatch:
    """Tokens of all sequences of a step, packed along T, with what the model needs to place them.

    Row r owns the tokens ``query_start[r] : query_start[r + 1]``; they are the last ones of its
    ``context_len[r]`` tokens. Padded rows have no tokens and context length 0; padded tokens come after the last
    row's and write to block 0.

    Attributes:
        token_ids_T: int32. A negative id ``-(w + 1)`` stands for the newest token of batch slot ``w``, which the
            host does not know yet; it is resolved on the device before the embedding.
        positions_T: int32, position of each token in its sequence; 0 for padding.
        query_start_Q: int32 [R + 1].
        context_len_R: int32, tokens of the sequence including those of this step.
        block_tables: one int32 [R, M] table per KV group; unused entries are 0.
        slots: one int32 [T] array per KV group: ``block * S + offset`` where K and V of the token are written.
        ancestors_TU: int32 tree masks of drafts, see ``ragged_paged_attention``; None if drafts are never trees.
    """

    token_ids_T: jax.Array
    positions_T: jax.Array
    query_start_Q: jax.Array
    context_len_R: jax.Array
    block_tables: tuple[jax.Array, ...]
    slots: tuple[jax.Array, ...]
    ancestors_TU: jax.Array | None = None
