"""Runs a model by hand on a tiny checkpoint: reads files, builds batches and tables, keeps the cache."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.checkpoints.weight_map import Source
from jaxinfer.kv_cache.layout import KVCache, LayerKV, group_layers
from jaxinfer.models.build import AbstractModel, abstract_model
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.decoder import kv_specs
from jaxinfer.models.registry import family, parse_config
from pallas_kernels.ops import Ops
from pallas_kernels.select import select_ops
from tests.support.compiling import UNOPTIMIZED

REFERENCE_OPS = select_ops("reference", "cpu", strict=True)
SLOTS = 4
TABLE_WIDTH = 16
MAX_ROWS = 3


@dataclass(frozen=True)
class Chunk:
    """The next tokens of a sequence in a step; ``sequence`` numbers it, which fixes its blocks."""

    sequence: int
    start: int
    tokens: tuple[int, ...]


def read_checkpoint(folder: Path) -> tuple[TransformerConfig, dict[str, np.ndarray]]:
    """Configuration and parameters by path, as read from what ``save_pretrained`` wrote."""
    config = parse_config(json.loads((folder / "config.json").read_text()))
    tensors = load_file(folder / "model.safetensors")
    weights = family(config.architecture).weight_map(config)
    used = {name for source in weights.values() for part in source.parts for name in part}
    unused = set(tensors) - used
    assert not unused, f"the weight map does not use {sorted(unused)}"
    return config, {path: assemble(source, tensors) for path, source in weights.items()}


def assemble(source: Source, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """The parameter that a source describes."""

    def taken(tensor: np.ndarray) -> np.ndarray:
        if source.rows is None:
            return tensor
        periods = tensor.reshape(-1, source.rows.period, *tensor.shape[1:])
        return periods[:, source.rows.start : source.rows.stop].reshape(-1, *tensor.shape[1:])

    rows = [np.concatenate([taken(tensors[name]) for name in part]) for part in source.parts]
    return (rows[0] if len(rows) == 1 else np.stack(rows)) + source.add


class ModelDriver:
    """One model, its cache, and a block table for each sequence and KV group.

    The cache starts as NaN, so that nothing unwritten can pass for a value. Blocks that left the window of a
    group are taken out of its table, as the engine does.
    """

    def __init__(
        self,
        config: TransformerConfig,
        params: dict[str, np.ndarray],
        max_model_len: int | None = None,
        ops: Ops = REFERENCE_OPS,
    ) -> None:
        self.config = config
        self.model: AbstractModel = abstract_model(config, ops, jnp.float32, max_model_len=max_model_len)
        assert {p: s.shape for p, s in self.model.shapes.items()} == {p: a.shape for p, a in params.items()}
        self.leaves = tuple(jnp.asarray(params[path], s.dtype) for path, s in self.model.shapes.items())
        self._step = jax.jit(self._forward, compiler_options=UNOPTIMIZED)
        self.reset()

    def reset(self) -> None:
        spec = kv_specs(self.config)[0]
        K = spec.num_kv_heads
        shape = (1 + MAX_ROWS * TABLE_WIDTH, K, SLOTS)
        pools = [jnp.full((*shape, h), jnp.nan, jnp.float32).at[0].set(7.0) for h in spec.widths]
        ones_K = jnp.ones((K,), jnp.float32)
        self.cache: KVCache = (LayerKV(*pools, ones_K, ones_K),) * self.config.num_layers

    def step(self, chunks: list[Chunk], padded_tokens: int) -> np.ndarray:
        """Logits ``[T, V]`` of all tokens of the chunks, without the padding."""
        logits_TV, self.cache = self._step(self.leaves, self.batch(chunks, padded_tokens), self.cache)
        logits_TV = np.asarray(logits_TV)[: sum(len(c.tokens) for c in chunks)]
        assert np.isfinite(logits_TV).all()
        return logits_TV

    def batch(self, chunks: list[Chunk], padded_tokens: int) -> ForwardBatch:
        windows, _ = group_layers(kv_specs(self.config))
        tokens = np.zeros(padded_tokens, np.int32)
        positions = np.zeros(padded_tokens, np.int32)
        slots = np.zeros((len(windows), padded_tokens), np.int32)
        starts = np.zeros(MAX_ROWS + 1, np.int32)
        lengths = np.zeros(MAX_ROWS, np.int32)
        tables = np.zeros((len(windows), MAX_ROWS, TABLE_WIDTH), np.int32)
        t = 0
        for r, chunk in enumerate(chunks):
            n = len(chunk.tokens)
            where = np.arange(chunk.start, chunk.start + n)
            tokens[t : t + n], positions[t : t + n] = chunk.tokens, where
            lengths[r] = chunk.start + n
            for g, window in enumerate(windows):
                blocks = self.blocks(chunk.sequence, g)
                slots[g, t : t + n] = blocks[where // SLOTS] * SLOTS + where % SLOTS
                used = np.arange(TABLE_WIDTH) * SLOTS < lengths[r]
                if window is not None:
                    used &= (np.arange(TABLE_WIDTH) + 1) * SLOTS > chunk.start + 1 - window
                tables[g, r] = np.where(used, blocks, 0)
            t += n
            starts[r + 1 :] = t
        return ForwardBatch(
            token_ids_T=jnp.asarray(tokens),
            positions_T=jnp.asarray(positions),
            query_start_Q=jnp.asarray(starts),
            context_len_R=jnp.asarray(lengths),
            block_tables=tuple(map(jnp.asarray, tables)),
            slots=tuple(map(jnp.asarray, slots)),
        )

    @staticmethod
    def blocks(sequence: int, group: int) -> np.ndarray:
        """Block ids of a sequence: scattered over the pool, and different in each group."""
        order = np.random.default_rng(group).permutation(MAX_ROWS * TABLE_WIDTH) + 1
        return order[sequence * TABLE_WIDTH : (sequence + 1) * TABLE_WIDTH]

    def _forward(self, leaves, batch, cache):
        model = self.model.merge(leaves)
        hidden_TD, cache = model(batch, cache)
        return model.logits(hidden_TD), cache
