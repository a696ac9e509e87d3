"""Memory of a device: weights, KV cache and temporaries, by the functions that the engine allocates with."""

import math
from dataclasses import dataclass

import jax.numpy as jnp

from jaxinfer.engine.memory import LOGITS_COPIES, MARGIN
from jaxinfer.kv_cache.allocate import CACHE_DTYPES, bytes_per_block, local_specs
from jaxinfer.kv_cache.layout import group_layers
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.decoder import kv_specs
from jaxinfer.planning.described import WeightFormat
from jaxinfer.planning.layouts import Replica
from jaxinfer.planning.load import CacheFormat
from jaxinfer.planning.parts import ModelParts

_CACHE_DTYPES = {"bf16": CACHE_DTYPES["bfloat16"], "fp8": CACHE_DTYPES["fp8_e4m3"]}


@dataclass(frozen=True)
class CacheGroup:
    """Layers of a stage with the same sliding window.

    Attributes:
        bytes_per_token: that one device stores, over all layers of the group.
    """

    window: int | None
    bytes_per_token: float

    def bytes_read(self, context: float) -> float:
        """Bytes that attention reads for the next token of a sequence of so many tokens."""
        return self.bytes_per_token * (context if self.window is None else min(context, self.window))


@dataclass(frozen=True)
class StageMemory:
    """What one device of a stage holds.

    Attributes:
        weights: bytes.
        groups: of the KV cache.
    """

    weights: float
    groups: tuple[CacheGroup, ...]

    @property
    def cache_per_token(self) -> float:
        """Bytes of a token while no window has passed it."""
        return sum(group.bytes_per_token for group in self.groups)

    def sequence_bytes(self, length: float, chunk: float, block_size: int) -> float:
        """Bytes that the blocks of a sequence take. A window keeps what it sees, a chunk in flight, and parts of a
        block at either end."""
        total = 0.0
        for group in self.groups:
            kept = length if group.window is None else min(length, group.window + chunk + block_size)
            total += math.ceil(kept / block_size) * block_size * group.bytes_per_token
        return total


def stage_memories(
    parts: ModelParts, replica: Replica, weights: WeightFormat, cache: CacheFormat
) -> tuple[StageMemory, ...]:
    """Memory of a device of each stage.

    Raises:
        ValueError: the devices cannot share the model; the message names both numbers.
    """
    specs = local_specs(kv_specs(parts.config), replica.layout)
    memories = []
    for first, stop in replica.stages(parts.config.num_layers):
        held = sum(n * p.local_bytes(replica.rules, weights) for n, p in parts.stage(first, stop))
        windows, groups = group_layers(specs[first:stop])
        per_token = bytes_per_block(specs[first:stop], groups, 1, jnp.dtype(_CACHE_DTYPES[cache]))
        memories.append(StageMemory(held, tuple(map(CacheGroup, windows, map(float, per_token)))))
    return tuple(memories)


def temporary_bytes(config: TransformerConfig, replica: Replica, tokens: float, rows: float) -> float:
    """What the largest step needs beside weights and cache on a device: an estimate. The engine compiles the step and
    reads it (``engine.memory.measure_temporaries``); the count of logits is the engine's.

    Args:
        tokens: that one device computes in a step.
        rows: of them that are sampled.
    """
    rules = replica.rules
    heads = rules.local("heads", config.num_heads) * config.head_dim
    width = rules.local("mlp", config.intermediate_size)
    if config.moe is not None:
        moe = config.moe
        chosen = moe.experts_per_token * rules.local("expert_mlp", moe.intermediate_size)
        width = max(width, chosen, moe.experts_per_token * config.hidden_size)
    hidden = 4 * config.hidden_size + 3 * heads + 3 * width
    logits = LOGITS_COPIES * 4 * rows * config.vocab_size / rules.size("vocab")
    return 2 * tokens * hidden + logits


def usable_memory(memory_bytes: float) -> float:
    """What weights, cache and temporaries may take of a device."""
    return memory_bytes * (1 - MARGIN)
