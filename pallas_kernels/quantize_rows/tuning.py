"""How the programs of one row each are launched."""

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.tuning_table import TuningTable

_TABLE = TuningTable(Path(__file__).with_name("tuning.json"))


@dataclass(frozen=True)
class Choice:
    """One row is one program.

    Attributes:
        num_warps: a power of two.
    """

    num_warps: int


def key(D: int, dtype: jnp.dtype) -> str:
    """Shapes that share a choice; the number of rows does not matter to a program of one row."""
    return f"{jnp.dtype(dtype).name}-d{D}"


def choose(generation: Generation, D: int, dtype: jnp.dtype) -> Choice:
    """The measured choice for a shape, or a rule: 16 values a thread, so that a row stays in registers."""
    if (entry := _TABLE.find(generation, key(D, dtype))) is not None:
        return Choice(**entry)
    return Choice(warps_for(D, 16))


def candidates(generation: Generation, D: int, dtype: jnp.dtype) -> tuple[Choice, ...]:
    """Choices that are worth measuring, the rule's or the table's first."""
    others = (Choice(warps_for(D, values)) for values in (8, 32))
    return tuple(dict.fromkeys((choose(generation, D, dtype), *others)))


def warps_for(values: int, per_thread: int) -> int:
    """Warps, between 1 and 16 and a power of two, whose threads hold at least so many values each."""
    return min(16, max(1, 1 << ((values - 1) // (32 * per_thread)).bit_length()))
