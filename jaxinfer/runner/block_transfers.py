"""Blocks that leave the device or come to it, for other engines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.kv_cache.layout import LayerKV, kv_partition
from jaxinfer.kv_transfer.layout import MAX_PIECE_BLOCKS
from jaxinfer.scheduler.plan import BlockRead
from sharding.layout import WHOLE, Layout

SIZES = tuple(MAX_PIECE_BLOCKS >> i for i in range(MAX_PIECE_BLOCKS.bit_length()))
"""Blocks per call of a program. Any number of blocks is a sum of these, so that nothing is padded."""

Part = tuple[LayerKV, ...]


@dataclass(frozen=True)
class BlockTransfers:
    """Reads and writes of blocks as whole logical heads, whatever devices hold them.

    Attributes:
        groups, heads: KV group, and K of the model, of each layer.
        layout: where the pools are.
        read: (layers of the cache, block ids [C]) -> K and V of each layer, ``[C, K, S, h]``.
        write: (layers of the cache, which are donated, block ids [C], contents as ``read`` gives them) -> the layers.
    """

    groups: tuple[int, ...]
    heads: tuple[int, ...]
    layout: Layout
    read: Callable[..., tuple[jax.Array, ...]]
    write: Callable[..., Part]

    @classmethod
    def make(cls, groups: tuple[int, ...], heads: tuple[int, ...], layout: Layout) -> "BlockTransfers":
        read = jax.jit(partial(_read, layout), static_argnums=(2,))
        write = jax.jit(partial(_write, layout), static_argnums=(3,), donate_argnums=(0,))
        return cls(groups, heads, layout, read, write)

    def take(self, read: BlockRead, first: int, part: Part) -> None:
        """Hands out a read's blocks in the layers that are its group's.

        Args:
            first: number of the first layer of ``part``.
        """
        layers = self._layers(read.group, first, len(part))
        if not layers:
            return
        of_group = tuple(part[layer - first] for layer in layers)
        heads = tuple(self.heads[layer] for layer in layers)
        for start, ids_C in pieces(read.blocks):
            read.take(layers, start, self.read(of_group, ids_C, heads))

    def put(
        self, part: Part, layers: tuple[int, ...], blocks: Sequence[int], contents: tuple[Any, ...]
    ) -> Part:
        """Layers of the cache, which are donated, with the content of some blocks.

        Args:
            part: the layers that ``layers`` names.
            contents: K and V of each of them, ``[C, K, S, h]``.
        """
        heads = tuple(self.heads[layer] for layer in layers)
        for start, ids_C in pieces(blocks):
            whole = len(ids_C) == len(blocks)  # as pieces of another engine are
            of_piece = tuple(
                self.layout.bring(x if whole else np.asarray(x)[start : start + len(ids_C)]) for x in contents
            )
            part = self.write(part, ids_C, of_piece, heads)
        return part

    def warm_ups(self, cache: Part, first_layers: Sequence[int]) -> list[Callable[[Part], Part]]:
        """Runs every program once, with block 0; each takes the cache and gives the new one.

        Args:
            first_layers: of the parts that are read; a part ends where the next one begins.
        """
        runs: list[Callable[[Part], Part]] = []
        stops = [*first_layers[1:], len(cache)]
        for first, stop in zip(first_layers, stops):
            for group in sorted(set(self.groups[first:stop])):
                layers = self._layers(group, first, stop - first)
                runs += [partial(self._run_once, layers, size) for size in SIZES]
        return runs

    def _run_once(self, layers: tuple[int, ...], size: int, cache: Part) -> Part:
        part = tuple(cache[layer] for layer in layers)
        ids_C = np.zeros(size, np.int32)
        heads = tuple(self.heads[layer] for layer in layers)
        contents = self.read(part, ids_C, heads)
        host = tuple(self.layout.bring(np.asarray(x)) for x in contents)
        return replaced(cache, layers, self.write(part, ids_C, host, heads))

    def _layers(self, group: int, first: int, count: int) -> tuple[int, ...]:
        return tuple(layer for layer in range(first, first + count) if self.groups[layer] == group)


def replaced(cache: Part, layers: tuple[int, ...], part: Part) -> Part:
    """The cache with some layers exchanged."""
    layers_of = list(cache)
    for layer, kv in zip(layers, part, strict=True):
        layers_of[layer] = kv
    return tuple(layers_of)


def pieces(blocks: Sequence[int]) -> list[tuple[int, np.ndarray]]:
    """Block ids int32 [C] cut into the sizes of programs, and where each piece starts."""
    cut: list[tuple[int, np.ndarray]] = []
    start = 0
    while start < len(blocks):
        size = next(size for size in SIZES if size <= len(blocks) - start)
        cut.append((start, np.array(blocks[start : start + size], np.int32)))
        start += size
    return cut


def _read(layout: Layout, part: Part, ids_C: jax.Array, heads: tuple[int, ...]) -> tuple[jax.Array, ...]:
    def gather(part: Part, ids_C: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.take(x, ids_C, axis=0, mode="clip") for kv in part for x in (kv.k_NKSh, kv.v_NKSh))

    partition = kv_partition(layout.rules)
    specs = (partition,) * len(part)
    joined = layout.spread(gather, (specs, WHOLE), (partition.k_NKSh,) * (2 * len(part)))(part, ids_C)
    # Where there are more devices than heads, some hold the same one.
    return tuple(x[:, :: x.shape[1] // heads[i // 2]] for i, x in enumerate(joined))


def _write(
    layout: Layout, part: Part, ids_C: jax.Array, contents: tuple[jax.Array, ...], heads: tuple[int, ...]
) -> Part:
    def scatter(part: Part, ids_C: jax.Array, contents: tuple[jax.Array, ...]) -> Part:
        return tuple(
            replace(
                kv,
                k_NKSh=_put(kv.k_NKSh, ids_C, contents[2 * i]),
                v_NKSh=_put(kv.v_NKSh, ids_C, contents[2 * i + 1]),
            )
            for i, kv in enumerate(part)
        )

    partition = kv_partition(layout.rules)
    specs = (partition,) * len(part)
    joined = tuple(
        jnp.repeat(x, kv.k_NKSh.shape[1] // K, axis=1)
        for x, kv, K in zip(contents, [kv for kv in part for _ in (0, 1)], [K for K in heads for _ in (0, 1)])
    )
    in_specs = (specs, WHOLE, (partition.k_NKSh,) * len(joined))
    return layout.spread(scatter, in_specs, specs)(part, ids_C, joined)


def _put(pool_NKSh: jax.Array, ids_C: jax.Array, content_CKSh: jax.Array) -> jax.Array:
    def write(i: jax.Array, pool: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice_in_dim(content_CKSh, i, 1)
        return jax.lax.dynamic_update_slice_in_dim(pool, row, ids_C[i], 0)

    return jax.lax.fori_loop(0, ids_C.shape[0], write, pool_NKSh)
