"""How many KV blocks fit: by an explicit setting, or by measuring the device."""

import logging
import os

import jax
import jax.numpy as jnp

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.config import EngineConfig
from jaxinfer.kv_cache.allocate import bytes_per_block, split_memory
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.decoder import kv_specs

logger = logging.getLogger(__name__)

MARGIN = 0.08
"""Share of the device that stays free: fragmentation and the programs' own buffers."""

HOST_SHARE = 0.25
"""On a CPU the memory belongs to everybody: share of what is available that an unconfigured cache takes."""


def fit_blocks(
    config: EngineConfig,
    model: TransformerConfig,
    plan: CompilePlan,
    windows: tuple[int | None, ...],
    groups: tuple[int, ...],
    cache_dtype: jnp.dtype,
) -> tuple[int, ...]:
    """Blocks of each KV group.

    Raises:
        ValueError: there is no room for one sequence of full length.
    """
    cache = config.cache
    if cache.num_blocks is not None:
        return (cache.num_blocks,) * len(windows)
    memory = cache.memory if cache.memory is not None else free_memory(activation_bytes(model, plan))
    blocks = split_memory(
        memory,
        bytes_per_block(kv_specs(model), groups, cache.block_size, cache_dtype),
        windows,
        cache.block_size,
        plan.max_num_seqs,
        plan.table_width * plan.block_size,
        config.scheduler.chunk_size or config.scheduler.max_num_batched_tokens,
    )
    logger.info("KV cache: %s blocks of %d tokens in %.2f GiB", blocks, cache.block_size, memory / 2**30)
    return blocks


def activation_bytes(model: TransformerConfig, plan: CompilePlan) -> int:
    """Upper bound of the buffers of the largest step and of its logits, in bytes."""
    T = plan.token_buckets[-1]
    widest = max(2 * model.intermediate_size, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
    rows = max(plan.row_buckets[-1], plan.scored_rows)
    return 4 * (T * (4 * model.hidden_size + 2 * widest) + 6 * rows * model.vocab_size)


def free_memory(reserved: int) -> int:
    """Bytes that the cache may take on the device: what is free now, less what the programs need."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        free = stats["bytes_limit"] * (1 - MARGIN) - stats["bytes_in_use"] - reserved
    else:
        free = HOST_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - reserved
    return max(int(free), 0)
