"""What a head learns from: the target's hidden states, by the engine's own forward pass, in shards on disk.

A shard is an ``.npz`` file of whole sequences. Hidden states are stored as bfloat16 (bit patterns in uint16), which
has the range of every model's activations.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.kv_cache.allocate import allocate
from jaxinfer.kv_cache.layout import KVCache, group_layers
from jaxinfer.models.decoder import kv_specs
from jaxinfer.models.segments import Leaves, SegmentedModel, SegmentKind, run_segment
from jaxinfer.speculative.training.files import write_atomically
from jaxinfer.speculative.training.text import TextSequence

PASS_TOKENS = 512
"""Tokens of a forward pass; a longer sequence has a pass of its own."""
_SLOTS = 16


@dataclass(frozen=True)
class SequenceFeatures:
    """One sequence of n tokens as its target sees it.

    Attributes:
        token_ids: int32 ``[n]``.
        prompt_len: tokens at the start that are not to be learnt.
        feature_nX: bfloat16, what the head reads at each position (see ``DraftHead.feature_layers``).
        final_nD: bfloat16, hidden states after the final norm.
        greedy_n: int32, the target's most probable next token behind each position.
    """

    token_ids: np.ndarray
    prompt_len: int
    feature_nX: np.ndarray
    final_nD: np.ndarray
    greedy_n: np.ndarray


class TargetFeatures:
    """Runs the target over whole sequences and keeps hidden states of chosen layers.

    Args:
        model: cut into segments of one layer, so that the input of every layer can be read.
        feature_layers: as ``DraftHead.feature_layers``.
        max_length: longest sequence.
    """

    def __init__(
        self,
        model: SegmentedModel,
        params: dict[str, jax.Array],
        feature_layers: tuple[int, ...],
        max_length: int,
    ) -> None:
        assert all(segment.num_layers == 1 for segment in model.segments)
        self._model, self._params, self._layers = model, params, feature_layers
        self._tokens = max(PASS_TOKENS, max_length)
        self._width = -(-max_length // _SLOTS)
        self._specs = kv_specs(model.config)
        self._windows, self._groups = group_layers(self._specs)
        self._embed = jax.jit(model.embed)
        self._run: dict[SegmentKind, Callable[..., tuple[jax.Array, KVCache, tuple[jax.Array, ...]]]] = {
            kind: jax.jit(partial(run_segment, kind)) for kind in {s.kind for s in model.segments}
        }
        self._head = jax.jit(partial(_finish, model))
        self._dtype = jax.eval_shape(model.embed, self._leaves(model.embed_paths), self._batch([]))[0].dtype

    def compute(self, sequences: Sequence[TextSequence]) -> list[SequenceFeatures]:
        """The features of sequences that fit into one pass; see ``passes``."""
        batch = self._batch(sequences)
        x_TD, ropes = self._embed(self._leaves(self._model.embed_paths), batch)
        kept: dict[int, jax.Array] = {}
        for index, segment in enumerate(self._model.segments):
            kept[index] = x_TD
            kv = self._cache(index)
            x_TD, _, _ = self._run[segment.kind](self._leaves(segment.paths), kv, x_TD, ropes, batch)
        kept[len(self._model.segments)] = x_TD
        final_TD, greedy_T = self._head(self._leaves(self._model.head_paths), x_TD)
        features = [kept[layer] for layer in self._layers] or [final_TD]
        return list(_cut(sequences, jnp.concatenate(features, axis=-1), final_TD, greedy_T))

    def passes(self, sequences: Sequence[TextSequence]) -> Iterator[list[TextSequence]]:
        """Groups that fit into one pass, in order."""
        group: list[TextSequence] = []
        for sequence in sequences:
            total = sum(len(s.token_ids) for s in group) + len(sequence.token_ids)
            if group and (total > self._tokens or len(group) == self._rows):
                yield group
                group = []
            group.append(sequence)
        if group:
            yield group

    @property
    def _rows(self) -> int:
        return self._tokens // _SLOTS

    def _leaves(self, paths: Sequence[str]) -> Leaves:
        return tuple(self._params[path] for path in paths)

    def _cache(self, layer: int) -> KVCache:
        blocks = 1 + self._tokens // _SLOTS + self._rows
        return allocate(self._specs[layer : layer + 1], (0,), (blocks,), _SLOTS, self._dtype, {})

    def _batch(self, sequences: Sequence[TextSequence]) -> ForwardBatch:
        T, R = self._tokens, self._rows
        tokens, positions, slots = (np.zeros(T, np.int32) for _ in range(3))
        starts, lengths = np.zeros(R + 1, np.int32), np.zeros(R, np.int32)
        table_RM = np.zeros((R, self._width), np.int32)
        t, block = 0, 1
        for row, sequence in enumerate(sequences):
            n = len(sequence.token_ids)
            where, used = np.arange(n), -(-n // _SLOTS)
            table_RM[row, :used] = np.arange(block, block + used)
            tokens[t : t + n], positions[t : t + n] = sequence.token_ids, where
            slots[t : t + n] = (block + where // _SLOTS) * _SLOTS + where % _SLOTS
            lengths[row] = n
            t, block = t + n, block + used
            starts[row + 1 :] = t
        groups = len(self._windows)
        return ForwardBatch(
            jnp.asarray(tokens),
            jnp.asarray(positions),
            jnp.asarray(starts),
            jnp.asarray(lengths),
            (jnp.asarray(table_RM),) * groups,
            (jnp.asarray(slots),) * groups,
        )


def _finish(model: SegmentedModel, leaves: Leaves, x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
    final_TD = model.final_norm(leaves, x_TD)
    chunk = 64  # bounds the logits that exist at a time
    x_XCD = x_TD.reshape(-1, chunk, x_TD.shape[-1])
    greedy_XC = jax.lax.map(lambda x_CD: jnp.argmax(model.head(leaves, x_CD), axis=-1), x_XCD)
    return final_TD, greedy_XC.reshape(-1).astype(jnp.int32)


def _cut(
    sequences: Sequence[TextSequence], feature_TX: jax.Array, final_TD: jax.Array, greedy_T: jax.Array
) -> Iterator[SequenceFeatures]:
    feature = np.asarray(feature_TX.astype(jnp.bfloat16))
    final, greedy = np.asarray(final_TD.astype(jnp.bfloat16)), np.asarray(greedy_T)
    start = 0
    for sequence in sequences:
        stop = start + len(sequence.token_ids)
        rows = slice(start, stop)
        yield SequenceFeatures(
            np.asarray(sequence.token_ids, np.int32),
            sequence.prompt_len,
            feature[rows],
            final[rows],
            greedy[rows],
        )
        start = stop


def bytes_per_token(feature_width: int, hidden_size: int) -> int:
    """Disk space of one position."""
    return 2 * (feature_width + hidden_size) + 8


def write_shard(path: Path, sequences: Sequence[SequenceFeatures]) -> None:
    """Writes a shard; a file under this name is complete."""
    arrays: dict[str, Any] = {
        "length": np.array([len(s.token_ids) for s in sequences], np.int32),
        "prompt_len": np.array([s.prompt_len for s in sequences], np.int32),
        "token_ids": np.concatenate([s.token_ids for s in sequences]),
        "feature": np.concatenate([s.feature_nX for s in sequences]).view(np.uint16),
        "final": np.concatenate([s.final_nD for s in sequences]).view(np.uint16),
        "greedy": np.concatenate([s.greedy_n for s in sequences]),
    }
    write_atomically(path, lambda file: np.savez(file, **arrays))


def read_shard(path: Path) -> list[SequenceFeatures]:
    """The sequences of a shard."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    bounds = np.concatenate([[0], np.cumsum(arrays["length"])])
    feature, final = (arrays[name].view(ml_dtypes.bfloat16) for name in ("feature", "final"))
    return [
        SequenceFeatures(
            arrays["token_ids"][start:stop],
            int(prompt_len),
            feature[start:stop],
            final[start:stop],
            arrays["greedy"][start:stop],
        )
        for start, stop, prompt_len in zip(bounds[:-1], bounds[1:], arrays["prompt_len"])
    ]
