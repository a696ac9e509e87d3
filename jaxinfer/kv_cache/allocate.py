"""Device arrays of the KV cache, and how many blocks fit."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoints.kv_scales import LayerScales
from jaxinfer.kv_cache.layout import KVCache, LayerKV, LayerKVSpec, kv_partition
from jaxinfer.layers.attention import kv_heads
from pallas_kernels.pool_limits import MAX_OFFSETS_32, offsets_fit
from sharding.axes import Part
from sharding.layout import ONE_DEVICE, Layout

CACHE_DTYPES = {
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "fp8_e4m3": jnp.float8_e4m3fn,
    "fp8_e5m2": jnp.float8_e5m2,
    "int8": jnp.int8,
}


def allocate(
    specs: Sequence[LayerKVSpec],
    groups: Sequence[int],
    num_blocks: Sequence[int],
    block_size: int,
    dtype: jnp.dtype,
    scales: LayerScales,
    layout: Layout = ONE_DEVICE,
) -> KVCache:
    """Zeroed pools for every layer, spread over KV heads and slots. Latents are one head, which every device holds, or
    its share of the slots.

    Args:
        specs: of the model.
        groups: KV group of each layer.
        num_blocks: N of each group.
        scales: of a quantized cache; layers that are absent have scale 1.
    """
    partition, slots = kv_partition(layout.rules), local_slots(block_size, layout)
    shapes = [
        [
            layout.joined_shape((num_blocks[group], spec.num_kv_heads, slots, width), partition.k_NKSh)  # type: ignore[arg-type]
            for width in spec.widths
        ]
        for spec, group in zip(local_specs(specs, layout), groups)
    ]
    pools = layout.make(
        lambda: [[jnp.zeros(shape, dtype) for shape in pair] for pair in shapes], partition.k_NKSh
    )

    def per_head(scale: np.ndarray, num_heads: int) -> jax.Array:
        whole_K = np.broadcast_to(scale.astype(np.float32), (num_heads,))
        return layout.place(whole_K, ((kv_heads(num_heads),),))

    cache = []
    for layer, (spec, (k_NKSh, v_NKSh)) in enumerate(zip(specs, pools)):
        k_scale, v_scale = scales.get(layer, (np.ones(1), np.ones(1)))
        K = spec.num_kv_heads
        cache.append(LayerKV(k_NKSh, v_NKSh, per_head(k_scale, K), per_head(v_scale, K)))
    return tuple(cache)


def cache_structs(
    specs: Sequence[LayerKVSpec], num_blocks: int, block_size: int, dtype: jnp.dtype, layout: Layout
) -> KVCache:
    """Shapes of a cache whose pools all have so many blocks."""
    partition = kv_partition(layout.rules)
    layers = []
    for spec in local_specs(specs, layout):
        shape = (num_blocks, spec.num_kv_heads, local_slots(block_size, layout))
        k_NKSh: Any
        v_NKSh: Any
        k_NKSh, v_NKSh = (jax.ShapeDtypeStruct((*shape, width), dtype) for width in spec.widths)
        scale: Any = jax.ShapeDtypeStruct((spec.num_kv_heads,), jnp.float32)
        layers.append(jax.tree.map(layout.struct, LayerKV(k_NKSh, v_NKSh, scale, scale), partition))
    return tuple(layers)


def local_specs(specs: Sequence[LayerKVSpec], layout: Layout) -> tuple[LayerKVSpec, ...]:
    """What one device stores of each layer."""

    def local(K: int) -> int:
        return layout.rules.local((kv_heads(K),), K)

    return tuple(replace(spec, num_kv_heads=local(spec.num_kv_heads)) for spec in specs)


def local_slots(block_size: int, layout: Layout) -> int:
    """Slots that one device holds of a block.

    Raises:
        ValueError: the devices cannot share it evenly.
    """
    return layout.rules.local((Part("slots", block_size),), block_size)


def bytes_per_block(
    specs: Sequence[LayerKVSpec], groups: Sequence[int], block_size: int, dtype: jnp.dtype
) -> tuple[int, ...]:
    """Bytes of one block of each group, over all its layers."""
    sizes = [0] * (max(groups) + 1)
    for spec, group in zip(specs, groups):
        sizes[group] += spec.num_kv_heads * block_size * sum(spec.widths) * jnp.dtype(dtype).itemsize
    return tuple(sizes)


def split_memory(
    memory: int,
    block_bytes: Sequence[int],
    windows: Sequence[int | None],
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    chunk: int,
) -> tuple[int, ...]:
    """Number of blocks of each group for so many bytes.

    A windowed group never needs more than what all sequences can see plus the chunk in flight; nobody needs more
    than all sequences at full length, and as much again for cached prefixes.

    Raises:
        ValueError: the memory does not hold one sequence of ``max_model_len``; the message says what would.
    """
    full = -(-max_model_len // block_size)
    per_seq = [full if w is None else min(full, -(-(w + 2 * chunk) // block_size) + 1) for w in windows]
    useful = [2 * n * max_num_seqs + 1 for n in per_seq]
    minimum = [n + 1 for n in per_seq]
    needed = sum(n * b for n, b in zip(minimum, block_bytes))
    if needed > memory:
        raise ValueError(
            f"the KV cache has {memory} bytes, but one sequence of {max_model_len} tokens needs {needed}; "
            "lower model.max_model_len or raise cache.memory"
        )
    share = min(
        1.0, (memory - needed) / max(1, sum((u - m) * b for u, m, b in zip(useful, minimum, block_bytes)))
    )
    return tuple(m + int((u - m) * share) for u, m in zip(useful, minimum))


def addressable_blocks(
    num_blocks: Sequence[int],
    specs: Sequence[LayerKVSpec],
    groups: Sequence[int],
    block_size: int,
    dtype: jnp.dtype,
) -> tuple[int, ...]:
    """At most ``num_blocks`` of each group, such that kernels can address every pool (see ``pool_limits``)."""
    fitting = list(num_blocks)
    for spec, group in zip(specs, groups):
        block = (spec.num_kv_heads, block_size, max(spec.widths))
        if not offsets_fit((fitting[group], *block), dtype)[0]:
            fitting[group] = MAX_OFFSETS_32 // math.prod(block)
    return tuple(fitting)
