"""How the programs of one row each are launched."""

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.quantize_rows.tuning import warps_for
from pallas_kernels.tuning_table import TuningTable

_TABLE = TuningTable(Path(__file__).with_name("tuning.json"))


@dataclass(frozen=True)
class Choice:
    """One row is one program.

    Attributes:
        num_warps: a power of two.
    """

    num_warps: int


def key(F: int, dtype: jnp.dtype) -> str:
    """Shapes that share a choice; the number of rows does not matter to a program of one row."""
    return f"{jnp.dtype(dtype).name}-f{F}"


def choose(generation: Generation, F: int, dtype: jnp.dtype) -> Choice:
    """The measured choice for a shape, or a rule: 32 values a thread, so that a row stays in registers."""
    if (entry := _TABLE.find(generation, key(F, dtype))) is not None:
        return Choice(**entry)
    return Choice(warps_for(F, 32))


def candidates(generation: Generation, F: int, dtype: jnp.dtype) -> tuple[Choice, ...]:
    """Choices that are worth measuring, the rule's or the table's first."""
    return tuple(dict.fromkeys((choose(generation, F, dtype), Choice(warps_for(F, 16)))))
