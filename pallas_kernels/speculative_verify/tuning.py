"""Tuning choices of verification."""

import math
from dataclasses import dataclass
from pathlib import Path

from pallas_kernels.gpus import Generation
from pallas_kernels.tuning_table import TuningTable

_TABLE = TuningTable(Path(__file__).with_name("tuning.json"))
# Enough programs for the largest card (132 multiprocessors), twice.
_PROGRAMS = 264
_GROUP = 128


@dataclass(frozen=True)
class Choice:
    """How the launches are cut. All are powers of two.

    Attributes:
        tile: tokens that a row's program reads at a time.
        row_warps: of the programs that own a row.
        groups: of 128 tokens, per program of the residual masses.
        residual_warps: of such a program.
    """

    tile: int
    row_warps: int
    groups: int
    residual_warps: int


def key(rows: int, vocab: int) -> str:
    """Name of a shape in the table; row counts are rounded up to a power of two."""
    return f"R{_power_of_two(rows)}-V{vocab}"


def choose(generation: Generation, rows: int, vocab: int) -> Choice:
    """The measured choice, or a rule: residual tiles of at most 4096 tokens, smaller where there are too few of them to
    occupy the card; 8 tokens per thread, of two laws."""
    entry = _TABLE.find(generation, key(rows, vocab))
    if entry is not None:
        return Choice(**entry)
    groups = 32
    while groups > 4 and rows * math.ceil(vocab / _GROUP / groups) < _PROGRAMS:
        groups //= 2
    row_warps = 16 if generation == "ampere" and rows > 32 else 8  # eight spill on the A100 with many rows
    return Choice(4096, row_warps, groups, max(1, groups // 4))


def candidates(generation: Generation, rows: int, vocab: int) -> tuple[Choice, ...]:
    """Choices worth measuring for a shape."""
    found = [choose(generation, rows, vocab)]
    for tile in (2048, 4096):
        found += [
            Choice(tile, warps, groups, max(1, groups // 4))
            for groups in (4, 8, 16, 32)
            for warps in (4, 8, 16)
        ]
    return tuple(dict.fromkeys(found))


def _power_of_two(n: int) -> int:
    return 1 << math.ceil(math.log2(max(n, 1)))
