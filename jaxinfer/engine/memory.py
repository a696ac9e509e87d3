"""How many KV blocks fit: by an explicit setting, or by measuring the device."""

import logging
import os
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.packing import Packing
from jaxinfer.config import EngineConfig
from jaxinfer.kv_cache.allocate import addressable_blocks, bytes_per_block, cache_structs, split_memory
from jaxinfer.kv_cache.layout import LayerKVSpec
from jaxinfer.models.segments import SegmentedModel, Struct
from jaxinfer.runner.programs import StepFunctions
from sharding.layout import WHOLE, Layout

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
    num_devices: int = 1,
    slots: int | None = None,
) -> tuple[int, ...]:
    """Blocks of each KV group.

    Args:
        specs: what one device stores; ``cache.memory`` is that of one device, too.
        temporary_bytes: what the largest programs need beside weights and cache; asked only if the size is not
            configured, since it takes a compilation to know.
        num_devices: that share the memory of the host, if they are CPUs.
        slots: that one device stores of a block; absent: all.

    Raises:
        ValueError: there is no room for one sequence of full length, or kernels could not address so many blocks.
    """
    cache = config.cache
    slots = slots or cache.block_size
    if cache.num_blocks is not None:
        asked = (cache.num_blocks,) * len(windows)
        allowed = addressable_blocks(asked, specs, groups, slots, cache_dtype)
        if allowed != asked:
            raise ValueError(
                f"cache.num_blocks is {cache.num_blocks}, but with a cache of {cache_dtype.name} kernels can address "
                f"at most {min(allowed)} blocks, or more than {2 * min(allowed)}"
            )
        return asked
    memory = cache.memory if cache.memory is not None else _free_memory(temporary_bytes(), num_devices)
    blocks = split_memory(
        memory,
        bytes_per_block(specs, groups, slots, cache_dtype),
        windows,
        cache.block_size,
        plan.max_num_seqs,
        plan.table_width * plan.block_size,
        config.scheduler.chunk_size or config.scheduler.max_num_batched_tokens,
    )
    blocks = addressable_blocks(blocks, specs, groups, slots, cache_dtype)
    logger.info("KV cache: %s blocks of %d tokens in %.2f GiB", blocks, cache.block_size, memory / 2**30)
    return blocks


def measure_temporaries(
    model: SegmentedModel,
    functions: StepFunctions,
    plan: CompilePlan,
    specs: tuple[LayerKVSpec, ...],
    cache_dtype: jnp.dtype,
    layout: Layout,
) -> int:
    """Bytes that the largest step needs on a device beside weights and cache: compiles its segments and reads what they
    take."""
    bucket = plan.token_buckets[-1]
    packed = jax.ShapeDtypeStruct((Packing.make(plan, bucket).size,), jnp.int32)
    newest_W = jax.ShapeDtypeStruct((plan.max_num_seqs + 1,), jnp.int32)
    embed_leaves = model.placed_structs(model.embed_paths, layout)
    step = jax.eval_shape(lambda *args: functions.embed(*args, bucket), embed_leaves, newest_W, packed)
    x_TD, ropes, batch = jax.tree.map(lambda struct: layout.struct(struct, WHOLE), step)
    # The cache's size is what is to be found out; a segment's temporaries do not depend on it.
    cache = cache_structs(specs, 2, plan.block_size, cache_dtype, layout)
    largest = 0
    # Segments of a kind may hold their weights in different forms, and then need different space.
    distinct = {(s.kind, _form(model.structs(s.paths))): s for s in model.segments}
    for segment in distinct.values():
        part = cache[segment.first : segment.first + segment.num_layers]
        leaves = model.placed_structs(segment.paths, layout)
        compiled = functions.segments[segment.kind].lower(leaves, part, x_TD, ropes, batch).compile()
        usage = compiled.memory_analysis()
        largest = max(largest, usage.temp_size_in_bytes if usage is not None else 0)
    rows = max(plan.row_buckets[-1], plan.scored_rows)
    logits = LOGITS_COPIES * 4 * rows * model.config.vocab_size // layout.rules.size("vocab")
    steps_in_flight = 2
    return largest + logits + steps_in_flight * x_TD.size * x_TD.dtype.itemsize


def _form(structs: tuple[Struct, ...]) -> Hashable:
    leaves, structure = jax.tree.flatten(structs)
    return structure, tuple(leaves)


def _free_memory(reserved: int, num_devices: int) -> int:
    """Bytes that the cache may take on a device: what is free now, less what the programs need."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        free = stats["bytes_limit"] * (1 - MARGIN) - stats["bytes_in_use"] - reserved
    else:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        free = HOST_SHARE * available / num_devices - reserved
    return max(int(free), 0)
