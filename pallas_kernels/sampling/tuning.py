"""Tuning choices of the truncated draw."""

import math
from dataclasses import dataclass
from pathlib import Path

from pallas_kernels.gpus import Generation
from pallas_kernels.tuning_table import TuningTable

_TABLE = TuningTable(Path(__file__).with_name("tuning.json"))
# Enough programs for the largest card (132 multiprocessors), twice.
_PROGRAMS = 264
_GROUP = 128
# Beyond it a program holds so many groups that chunks of 64 spill registers on Hopper, and those of 16 elsewhere.
_LARGE_VOCAB = 200_000


@dataclass(frozen=True)
class Choice:
    """How the launches are cut. All are powers of two.

    Attributes:
        groups: of 128 tokens, per program of the full read.
        stats_warps: of such a program.
        chunk: candidate groups that a search reads at a time.
        row_warps: of the programs that own a row.
    """

    groups: int
    stats_warps: int
    chunk: int
    row_warps: int


def key(rows: int, vocab: int) -> str:
    """Name of a shape in the table; row counts are rounded up to a power of two."""
    return f"P{_power_of_two(rows)}-V{vocab}"


def choose(generation: Generation, rows: int, vocab: int) -> Choice:
    """The measured choice, or a rule: tiles of at most 4096 logits, smaller where a batch has too few of them to occupy
    the card; 32 logits per thread."""
    entry = _TABLE.find(generation, key(rows, vocab))
    if entry is not None:
        return Choice(**entry)
    groups = 32
    while groups > 4 and rows * math.ceil(vocab / _GROUP / groups) < _PROGRAMS:
        groups //= 2
    chunk = 16 if vocab > _LARGE_VOCAB and generation == "hopper" else 64
    return Choice(groups, max(1, groups // 8), chunk, 8)


def candidates(generation: Generation, rows: int, vocab: int) -> tuple[Choice, ...]:
    """Choices worth measuring for a shape."""
    found = [choose(generation, rows, vocab)]
    for groups in (4, 8, 16, 32):
        for warps in (1, 2, 4):
            if 8 <= groups * 4 // warps <= 64:
                found += [Choice(groups, warps, chunk, 8) for chunk in (16, 64)]
    return tuple(dict.fromkeys(found))


def _power_of_two(n: int) -> int:
    return 1 << math.ceil(math.log2(max(n, 1)))
