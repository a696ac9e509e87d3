"""Sequences of hidden states as batches of one shape, in an order that depends on seed and step only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.tree_util import register_dataclass

from jaxinfer.speculative.training.features import SequenceFeatures


@register_dataclass
@dataclass(frozen=True)
class TrainBatch:
    """B sequences, padded to n tokens. *Place* i is where token i is the newest one and token i + 1 is drafted.

    Attributes:
        token_ids_Bn: int32.
        feature_BnX: what the head reads of the position before each place, 0 at place 0; bfloat16.
        final_BnD: the target's final hidden states at each position, bfloat16.
        greedy_Bn: int32, the target's best token behind each position.
        length_B, prompt_len_B: int32.
    """

    token_ids_Bn: jax.Array
    feature_BnX: jax.Array
    final_BnD: jax.Array
    greedy_Bn: jax.Array
    length_B: jax.Array
    prompt_len_B: jax.Array


def make_batch(sequences: Sequence[SequenceFeatures], size: int, length: int) -> TrainBatch:
    """A batch of ``size`` sequences of at most ``length`` tokens; missing ones are empty."""
    first = sequences[0]
    token_ids, greedy = np.zeros((size, length), np.int32), np.zeros((size, length), np.int32)
    feature = np.zeros((size, length, first.feature_nX.shape[1]), first.feature_nX.dtype)
    final = np.zeros((size, length, first.final_nD.shape[1]), first.final_nD.dtype)
    lengths, prompts = np.zeros(size, np.int32), np.zeros(size, np.int32)
    for row, sequence in enumerate(sequences):
        n = len(sequence.token_ids)
        token_ids[row, :n], greedy[row, :n] = sequence.token_ids, sequence.greedy_n
        feature[row, 1:n], final[row, :n] = sequence.feature_nX[:-1], sequence.final_nD
        lengths[row], prompts[row] = n, sequence.prompt_len
    return TrainBatch(*map(jax.numpy.asarray, (token_ids, feature, final, greedy, lengths, prompts)))


def train_order(count: int, batch: int, seed: int, step: int) -> list[int]:
    """Indices of the sequences of a step: epochs of random order, one behind the other."""
    indices = []
    for place in range(step * batch, (step + 1) * batch):
        epoch, offset = divmod(place, count)
        indices.append(int(np.random.default_rng([seed, epoch]).permutation(count)[offset]))
    return indices


def in_order(
    sequences: Sequence[SequenceFeatures], size: int, length: int
) -> Iterator[tuple[Sequence[SequenceFeatures], TrainBatch]]:
    """All sequences once, with their batches."""
    for start in range(0, len(sequences), size):
        group = sequences[start : start + size]
        yield group, make_batch(group, size, length)
