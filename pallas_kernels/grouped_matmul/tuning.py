"""Tile sizes of the grouped matrix product per GPU generation and shape."""

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.tuning_table import TuningTable

_TABLE = TuningTable(Path(__file__).with_name("tuning.json"))


@dataclass(frozen=True)
class Choice:
    """How the product is cut.

    Attributes:
        rows, columns: of an output tile.
        depth: of the inner dimension per step of the loop.
        band: columns tiles that run one after the other before the next tile of rows does. Tiles of rows of the same
            expert are neighbours, so they find the band's weights in the L2 cache.
        num_warps: a power of two.
        num_stages: of the software pipeline.
    """

    rows: int
    columns: int
    depth: int
    band: int
    num_warps: int
    num_stages: int


def key(T: int, E: int, O: int, I: int, dtype: jnp.dtype) -> str:
    """Shapes that share a choice: the rows count by their mean per expert, rounded up to a power of two."""
    return f"{jnp.dtype(dtype).name}-o{O}-i{I}-e{E}-r{_mean_rows(T, E)}"


def choose(generation: Generation, T: int, E: int, O: int, I: int, dtype: jnp.dtype) -> Choice:
    """The measured choice for a shape, or that of a rule.

    The rule: few rows per expert are bound by reading weights, so tiles are as small as a tensor-core instruction
    allows, and long steps keep many bytes in flight. From 64 rows per expert on tiles are squarer. Tiles of 128 rows
    pay only for long groups: every group wastes half a tile on average.
    """
    if (entry := _TABLE.find(generation, key(T, E, O, I, dtype))) is not None:
        return Choice(**entry)
    mean = _mean_rows(T, E)
    if jnp.dtype(dtype).itemsize == 4:
        return Choice(16, 32, 32, 16, 4, 3) if mean <= 16 else Choice(64, 64, 16, 16, 8, 3)
    if mean <= 32:
        return Choice(max(16, mean), 64, 128 if I % 128 == 0 else 64, 16, 4, 4)
    stages = 3 if generation == "ada" else 4
    if mean <= 256 or generation == "ada":
        return Choice(64, 128, 64, 16, 4, stages)
    return Choice(128, 128, 64, 16, 8, stages)


def candidates(
    generation: Generation, T: int, E: int, O: int, I: int, dtype: jnp.dtype
) -> tuple[Choice, ...]:
    """Choices that are worth measuring, the rule's or the table's first."""
    first = choose(generation, T, E, O, I, dtype)
    mean = _mean_rows(T, E)
    if jnp.dtype(dtype).itemsize == 4:
        more = [Choice(16, 64, 32, 16, 4, 3), Choice(32, 64, 32, 16, 8, 2)]
    elif mean <= 32:
        more = [Choice(16, columns, 64, 16, 4, stages) for columns in (32, 64, 128) for stages in (3, 5)]
        more += [Choice(32, 64, 64, 16, 4, 4), Choice(16, 32, 128, 16, 2, 4)]
    else:
        more = [Choice(64, 64, 64, 16, 4, 4), Choice(64, 128, 64, 32, 8, 3), Choice(128, 64, 64, 16, 4, 3)]
        # The largest tile spills registers before Hopper, and both need more shared memory than Ada has.
        more += [] if generation == "ada" else [Choice(64, 256, 64, 8, 8, 3)]
        more += [Choice(128, 256, 64, 8, 8, 3)] if generation == "hopper" else []
    return (first, *(choice for choice in more if choice != first))


def _mean_rows(T: int, E: int) -> int:
    return 1 << (-(-T // E) - 1).bit_length()
