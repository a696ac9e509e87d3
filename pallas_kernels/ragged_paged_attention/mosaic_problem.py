"""What the thread blocks of the Mosaic attention share: static sizes, shared memory, and the range of a tile."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.mosaic_tiles import (
    TILE_UNITS,
    UNIT_TOKENS,
    WARPGROUP_UNITS,
    Tile,
)

ROWS = WARPGROUP_UNITS * UNIT_TOKENS
COMPUTE_WARPGROUPS = TILE_UNITS // WARPGROUP_UNITS
LOADER = COMPUTE_WARPGROUPS
# Per thread of one warpgroup, if the others had none: 504 and not 512, since all three start with 168.
REGISTERS = 504
# Columns of a tile of shared memory that is swizzled in rows of 128 bytes.
SWIZZLE_COLUMNS = 64
Ref = Any


@dataclass(frozen=True)
class Problem:
    """What the code of the kernel depends on.

    Attributes:
        G: query heads per KV head.
        N, S, M, h: blocks in the pool, slots in a block, width of the table, head width.
        slots: of the context per step of the ring.
        stages: steps in the ring.
        loader_registers: per thread.
    """

    G: int
    N: int
    S: int
    M: int
    h: int
    scale: float
    window: int | None
    soft_cap: float | None
    slots: int
    stages: int
    loader_registers: int

    @property
    def compute_registers(self) -> int:
        """What the loader leaves to each compute warpgroup, in the steps of 8 that can be asked for."""
        return (REGISTERS - self.loader_registers) // COMPUTE_WARPGROUPS // 8 * 8

    @property
    def copy_slots(self) -> int:
        """Slots that one copy brings: a page, or the part of it that fills a step."""
        return min(self.S, self.slots)

    @property
    def copies(self) -> int:
        return self.slots // self.copy_slots


@dataclass(frozen=True)
class Buffers:
    """Shared memory and barriers of a thread block; the leading index is the warpgroup or the step in the ring."""

    q_WMh: Ref
    k_LBh: Ref
    v_LBh: Ref
    p_WMB: Ref
    out_WMn: Ref
    q_ready_W: Ref
    k_ready_L: Ref
    v_ready_L: Ref
    k_free_L: Ref
    v_free_L: Ref
    v_tail: Ref


def scratch(problem: Problem, dtype: Any) -> dict[str, Any]:
    """The types of ``Buffers``."""
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    W, L, B, h = COMPUTE_WARPGROUPS, problem.stages, problem.slots, problem.h
    filled = plgpu.Barrier(num_arrivals=problem.copies, num_barriers=L)
    freed = plgpu.Barrier(num_arrivals=W, num_barriers=L)
    return {
        "q_WMh": plgpu.SMEM((W, ROWS, h), dtype, transforms=tiled),
        "k_LBh": plgpu.SMEM((L, B, h), dtype, transforms=tiled),
        "v_LBh": plgpu.SMEM((L, B, h), dtype, transforms=tiled),
        "p_WMB": plgpu.SMEM((W, ROWS, B), dtype, transforms=tiled),
        "out_WMn": plgpu.SMEM((W, ROWS, SWIZZLE_COLUMNS), dtype),
        "q_ready_W": plgpu.Barrier(num_arrivals=WARPGROUP_UNITS, num_barriers=W),
        "k_ready_L": filled,
        "v_ready_L": filled,
        "k_free_L": freed,
        "v_free_L": freed,
        "v_tail": plgpu.Barrier(num_arrivals=problem.copies),
    }


@dataclass(frozen=True)
class Span:
    """Steps of the ring that a tile runs over, and the pages it may read; int32 scalars.

    Attributes:
        low, high: steps.
        plain_low, plain_high: the steps in which every query of the tile sees every slot.
        first_page, end_page: pages that hold a visible slot.
        tail: slots of the last step that are clean: the sequence's own, or filled with zeros in copying.
    """

    low: jax.Array
    high: jax.Array
    plain_low: jax.Array
    plain_high: jax.Array
    first_page: jax.Array
    end_page: jax.Array
    tail: jax.Array


def unit_token(problem: Problem, tile: Tile, unit: jax.Array) -> jax.Array:
    """First token of a unit that is counted from the tile's first."""
    return (tile.group + (tile.unit + unit) // problem.G) * UNIT_TOKENS


def span_of(problem: Problem, tile: Tile) -> Span:
    """Bounds for all queries of a tile, so that its warpgroups stay in step."""
    first_token = jnp.maximum(unit_token(problem, tile, jnp.int32(0)), tile.start)
    last_token = jnp.minimum(unit_token(problem, tile, jnp.int32(TILE_UNITS - 1)) + UNIT_TOKENS, tile.end) - 1
    seen = jnp.maximum(last_token + tile.shift + 1, 0)
    plain = jnp.maximum(first_token + tile.shift + 1, 0)
    first_page, end_page = tile.first // problem.S, (seen + problem.S - 1) // problem.S
    low, high = first_page * problem.S // problem.slots, (seen + problem.slots - 1) // problem.slots
    high = jnp.maximum(low, high)
    edge = jnp.int32(0) if problem.window is None else jnp.maximum(seen - problem.window, 0)
    plain_low = jnp.clip((edge + problem.slots - 1) // problem.slots, low, high)
    plain_high = jnp.clip(plain // problem.slots, plain_low, high)
    inside = end_page * problem.S <= tile.context
    tail = jnp.where(inside, problem.slots, tile.context - (high - 1) * problem.slots)
    return Span(low, high, plain_low, plain_high, first_page, end_page, tail)


def columns(shape: tuple[int, int], dimension: int = 1) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)
