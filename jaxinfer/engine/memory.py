"""How many KV blocks fit: by an explicit setting, or by measuring the device."""

import logging
import os
from collections.abc import Callable, Hashable
from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.packing import Packing
from jaxinfer.config import EngineConfig
from jaxinfer.kv_cache.allocate import addressable_blocks, allocate, bytes_per_block, split_memory
from jaxinfer.kv_cache.layout import LayerKVSpec
from jaxinfer.models.segments import SegmentedModel, Struct, run_segment

logger = logging.getLogger(__name__)

MARGIN = 0.08
"""Share of the device that stays free: fragmentation and the programs' own buffers."""

LOGITS_COPIES = 6
"""Arrays of the size of the logits that head and sampler hold at the same time, at most."""

HOST_SHARE = 0.25
"""On a CPU the memory belongs to everybody: share of what is available that an unconfigured cache takes."""


def fit_blocks(
    config: EngineConfig,
    plan: CompilePlan,
    specs: tuple[LayerKVSpec, ...],
    windows: tuple[int | None, ...],
    groups: tuple[int, ...],
    cache_dtype: jnp.dtype,
    temporary_bytes: Callable[[], int],
) -> tuple[int, ...]:
    """Blocks of each KV group.

    Args:
        temporary_bytes: what the largest programs need beside weights and cache; asked only if the size is not
            configured, since it takes a compilation to know.

    Raises:
        ValueError: there is no room for one sequence of full length, or kernels could not address so many blocks.
    """
    cache = config.cache
    if cache.num_blocks is not None:
        asked = (cache.num_blocks,) * len(windows)
        allowed = addressable_blocks(asked, specs, groups, cache.block_size, cache_dtype)
        if allowed != asked:
            raise ValueError(
                f"cache.num_blocks is {cache.num_blocks}, but with a cache of {cache_dtype.name} kernels can address "
                f"at most {min(allowed)} blocks, or more than {2 * min(allowed)}"
            )
        return asked
    memory = cache.memory if cache.memory is not None else _free_memory(temporary_bytes())
    blocks = split_memory(
        memory,
        bytes_per_block(specs, groups, cache.block_size, cache_dtype),
        windows,
        cache.block_size,
        plan.max_num_seqs,
        plan.table_width * plan.block_size,
        config.scheduler.chunk_size or config.scheduler.max_num_batched_tokens,
    )
    blocks = addressable_blocks(blocks, specs, groups, cache.block_size, cache_dtype)
    logger.info("KV cache: %s blocks of %d tokens in %.2f GiB", blocks, cache.block_size, memory / 2**30)
    return blocks


def measure_temporaries(
    model: SegmentedModel,
    plan: CompilePlan,
    specs: tuple[LayerKVSpec, ...],
    groups: tuple[int, ...],
    cache_dtype: jnp.dtype,
) -> int:
    """Bytes that the largest step needs beside weights and cache: compiles its segments and reads what they take."""
    packing = Packing.make(plan, plan.token_buckets[-1])
    batch = jax.eval_shape(packing.unpack, jax.ShapeDtypeStruct((packing.size,), jnp.int32))
    x_TD, ropes = jax.eval_shape(model.embed, model.structs(model.embed_paths), batch)
    # The cache's size is what is to be found out; a segment's temporaries do not depend on it.
    num_blocks = (2,) * plan.num_groups
    cache = jax.eval_shape(partial(allocate, specs, groups, num_blocks, plan.block_size, cache_dtype, {}))
    largest = 0
    # Segments of a kind may hold their weights in different forms, and then need different space.
    distinct = {(s.kind, _form(model.structs(s.paths))): s for s in model.segments}
    for segment in distinct.values():
        part = cache[segment.first : segment.first + segment.num_layers]
        program = jax.jit(partial(run_segment, segment.kind), donate_argnums=(1, 2))
        compiled = program.lower(model.structs(segment.paths), part, x_TD, ropes, batch).compile()
        usage = compiled.memory_analysis()
        largest = max(largest, usage.temp_size_in_bytes if usage is not None else 0)
    rows = max(plan.row_buckets[-1], plan.scored_rows)
    logits = LOGITS_COPIES * 4 * rows * model.config.vocab_size
    steps_in_flight = 2
    return largest + logits + steps_in_flight * x_TD.size * x_TD.dtype.itemsize


def _form(structs: tuple[Struct, ...]) -> Hashable:
    leaves, structure = jax.tree.flatten(structs)
    return structure, tuple(leaves)


def _free_memory(reserved: int) -> int:
    """Bytes that the cache may take on the device: what is free now, less what the programs need."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        free = stats["bytes_limit"] * (1 - MARGIN) - stats["bytes_in_use"] - reserved
    else:
        free = HOST_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - reserved
    return max(int(free), 0)
