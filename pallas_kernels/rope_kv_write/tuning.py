"""Tuning choices of the fused rotary embedding and KV write."""

import math
from dataclasses import dataclass
from pathlib import Path

from pallas_kernels.gpus import Generation
from pallas_kernels.tuning_table import TuningTable

_TABLE = TuningTable(Path(__file__).with_name("tuning.json"))
# Enough programs for the largest card (132 multiprocessors), twice.
_PROGRAMS = 264


@dataclass(frozen=True)
class Choice:
    """How a program works.

    Attributes:
        rows: pairs of token and head; a power of two.
        num_warps: a power of two.
    """

    rows: int
    num_warps: int


def key(heads: int, width: int, pool_dtype: str, tokens: int) -> str:
    """Name of a shape in the table; ``heads`` counts those of q, k and v, tokens are rounded up to a power of two."""
    return f"A{heads}-h{width}-{pool_dtype}-T{_power_of_two(tokens)}"


def choose(generation: Generation, heads: int, width: int, pool_dtype: str, tokens: int) -> Choice:
    """The measured choice, or a rule: as large a tile as leaves two programs for every multiprocessor, up to 2048
    values, 16 values per thread."""
    entry = _TABLE.find(generation, key(heads, width, pool_dtype, tokens))
    if entry is not None:
        return Choice(**entry)
    most = max(1, 2048 // _power_of_two(width))
    rows = min(most, _power_of_two(max(1, tokens * heads // _PROGRAMS)))
    return Choice(rows, min(4, max(1, rows * _power_of_two(width) // 512)))


def candidates(
    generation: Generation, heads: int, width: int, pool_dtype: str, tokens: int
) -> tuple[Choice, ...]:
    """Choices worth measuring for a shape."""
    lanes = _power_of_two(width)
    found = [choose(generation, heads, width, pool_dtype, tokens)]
    for values in (512, 1024, 2048, 4096):
        rows = max(1, values // lanes)
        found += [Choice(rows, warps) for warps in (1, 2, 4, 8) if 4 <= rows * lanes // (32 * warps) <= 32]
    return tuple(dict.fromkeys(found))


def _power_of_two(n: int) -> int:
    return 1 << math.ceil(math.log2(max(n, 1)))
