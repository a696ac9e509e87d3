"""What the sampler remembers of each batch slot, and how it changes; every change is in place when
donated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.sampling.inputs import SamplerState
from jaxinfer.sampling.vocabulary import Vocabulary

HISTORY_CHUNK = 1024
"""Token ids per call of ``reset_slot``: one compiled shape for histories of any length."""


def init_state(num_slots: int, vocab: int) -> SamplerState:
    """Empty state of ``num_slots`` batch slots and a spare one, the last, for padded rows."""
    return SamplerState(
        newest_W=jnp.zeros(num_slots + 1, jnp.int32),
        output_counts_WV=jnp.zeros((num_slots + 1, vocab), jnp.int32),
        prompt_seen_WV=jnp.zeros((num_slots + 1, vocab), bool),
    )


def record(
    state: SamplerState, slot_P: jax.Array, token_P: jax.Array, newest_P: jax.Array, vocab: Vocabulary
) -> SamplerState:
    """Adds sampled tokens to their slots.

    Args:
        slot_P: of each token; the spare slot's content means nothing.
        newest_P: slot whose newest token it is; distinct, except the spare one.
    """
    column_P = vocab.column(token_P, state.output_counts_WV.shape[1])
    return replace(
        state,
        newest_W=state.newest_W.at[newest_P].set(token_P),
        output_counts_WV=state.output_counts_WV.at[slot_P, column_P].add(1, mode="drop"),
    )


def reset_slot(
    state: SamplerState,
    slot: jax.Array,
    prompt_ids_X: jax.Array,
    prompt_len: jax.Array,
    output_ids_X: jax.Array,
    output_len: jax.Array,
    first: jax.Array,
    vocab: Vocabulary | None = None,
) -> SamplerState:
    """Makes a slot remember one sequence; called once per chunk of its history. Jittable, with ``state``
    donated.

    Args:
        state: of all slots.
        slot: int32 scalar.
        prompt_ids_X, output_ids_X: int32 [HISTORY_CHUNK], one chunk of each; padded with anything.
        prompt_len, output_len: int32 scalars, how many ids of the chunk are real.
        first: bool scalar; True forgets the slot's former sequence, False adds to it.
        vocab: where devices share the vocabulary; None: it is all here.

    Returns:
        The state; the newest token of the slot is the last output id given, if any.
    """
    columns = state.output_counts_WV.shape[1]
    vocab = vocab or Vocabulary(columns)
    place_X = jnp.arange(prompt_ids_X.shape[0])
    # The number of columns is out of range: dropped.
    prompt_X = jnp.where(place_X < prompt_len, vocab.column(prompt_ids_X, columns), columns)
    output_X = jnp.where(place_X < output_len, vocab.column(output_ids_X, columns), columns)
    seen_V = lax.dynamic_index_in_dim(state.prompt_seen_WV, slot, keepdims=False) & ~first
    count_V = jnp.where(first, 0, lax.dynamic_index_in_dim(state.output_counts_WV, slot, keepdims=False))
    newest = jnp.where(first, 0, state.newest_W[slot])
    newest = jnp.where(output_len > 0, output_ids_X[output_len - 1], newest)
    seen_V = seen_V.at[prompt_X].set(True, mode="drop")
    count_V = count_V.at[output_X].add(1, mode="drop")
    return SamplerState(
        newest_W=state.newest_W.at[slot].set(newest),
        output_counts_WV=lax.dynamic_update_index_in_dim(state.output_counts_WV, count_V, slot, 0),
        prompt_seen_WV=lax.dynamic_update_index_in_dim(state.prompt_seen_WV, seen_V, slot, 0),
    )


def history_chunks(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Iterator[tuple[np.ndarray, ...]]:
    """Arguments, after state and slot, of the ``reset_slot`` calls that load a history; at least one call."""
    length = max(len(prompt_ids), len(output_ids), 1)
    for start in range(0, length, HISTORY_CHUNK):
        arrays: list[np.ndarray] = []
        for ids in (prompt_ids, output_ids):
            chunk = ids[start : start + HISTORY_CHUNK]
            padded_X = np.zeros(HISTORY_CHUNK, np.int32)
            padded_X[: len(chunk)] = chunk
            arrays += [padded_X, np.asarray(len(chunk), np.int32)]
        yield (*arrays, np.asarray(start == 0))
