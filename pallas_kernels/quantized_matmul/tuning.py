"""Tuning choices of the quantized matrix product."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import jax

from pallas_kernels.gpus import Generation
from pallas_kernels.quantized_matmul.weights import PLANE, TILE, Activation, Format, QuantizedWeight
from pallas_kernels.tuning_table import TuningTable

TABLE = TuningTable(Path(__file__).with_name("tuning.json"))
_MULTIPROCESSORS: dict[Generation, int] = {"ampere": 108, "ada": 58, "hopper": 132, "blackwell": 148}
MOST_SPLITS = 16
MOST_SMALL = 64
"""Tokens up to which reading the weight takes most of the time."""


@dataclass(frozen=True)
class Choice:
    """How a kernel is cut.

    Attributes:
        block_o, block_m: outputs and tokens of a program.
        columns: stored bytes of an output that a step of the loop reads (for int4: twice as many inputs).
        splits: programs along the inputs; their sums are added in a fixed order.
        num_warps: of Triton; Mosaic's thread blocks have three times four.
        num_stages: steps in flight.
    """

    block_o: int
    block_m: int
    columns: int
    splits: int
    num_warps: int = 4
    num_stages: int = 3


MOSAIC_CANDIDATES = tuple(
    Choice(block_o, 128, TILE, 1, 4, stages) for block_o, stages in ((128, 5), (128, 4), (64, 6))
)


@dataclass(frozen=True)
class Facts:
    """What the best choice depends on. ``tokens`` is a bucket (a power of two), so that the choice, and with it the
    bits of a row's result, do not change within one."""

    tokens: int
    outputs: int
    inputs: int
    format: Format
    group: int | None
    activation: Activation | None
    itemsize: int


def facts(x_TI: jax.Array, w: QuantizedWeight) -> Facts:
    """Of the arguments of the op."""
    T, I = x_TI.shape
    tokens = 1 << max(0, T - 1).bit_length()
    return Facts(tokens, w.values_JOP.shape[1], I, w.format, w.group, w.activation, x_TI.dtype.itemsize)


def problem(choice: Choice, w: QuantizedWeight) -> str:
    """Why the Triton kernel cannot be cut so; empty if it can."""
    P = w.values_JOP.shape[2]
    if P % choice.columns or (w.group or P) % choice.columns:
        return f"{choice.columns} columns; allowed: divisors of {P} stored bytes and of the group {w.group}"
    return ""


def key(of: Facts, backend: str = "triton") -> str:
    """In the tuning table. Numbers of tokens with one best choice share it: up to 8, 16, 32, 64, and more ("many")."""
    group = "" if of.group is None else f"-g{of.group}"
    act = "" if of.activation is None else f"-a{of.activation}"
    tokens = "many" if of.tokens > MOST_SMALL else max(of.tokens, 8)
    return f"{backend}-{of.format}{group}{act}-m{tokens}-o{of.outputs}-i{of.inputs}"


def choose(generation: Generation, of: Facts) -> Choice:
    """The table's choice, else a rule: enough programs to fill the card, and enough loads in flight."""
    entry = TABLE.find(generation, key(of))
    if entry is not None and of.itemsize == 2:
        return Choice(**entry)
    columns = _widest(of)
    if of.itemsize == 4:  # Without tensor cores: small tiles, since operands live in registers.
        columns = min(columns, 32)
        return Choice(32, 16, columns, _splits(generation, of, 32, 16, columns), 4, 2)
    few_registers = generation in ("ampere", "ada") and of.group is not None
    if of.tokens <= MOST_SMALL:
        # Two warps rule out wgmma, whose operand layout costs a Hopper multiprocessor twice the instructions to
        # convert 4-bit weights, so that they and not the memory would limit it.
        block_o, block_m = 64, max(of.tokens, 8)
        splits = _splits(generation, of, block_o, block_m, columns)
        if few_registers and of.format == "int8":  # two warps would spill
            return Choice(block_o, block_m, columns, splits, 4, 3)
        return Choice(block_o, block_m, columns, splits, 2 if block_m <= 32 else 4, 4 if block_m <= 32 else 3)
    columns = min(columns, 64)
    # Without wgmma, sums of groups beside those of the whole take more registers than there are for 128 tokens.
    block_m = 64 if few_registers and (of.format == "int8" or of.group != TILE) else 128
    splits = _splits(generation, of, 128, block_m, columns)
    return Choice(128, block_m, columns, splits, 8, 3)


def choose_mosaic(of: Facts) -> Choice:
    """The table's choice of the Mosaic kernel, else what fills the shared memory."""
    entry = TABLE.find("hopper", key(of, "mosaic"))
    return MOSAIC_CANDIDATES[0] if entry is None else Choice(**entry)


def candidates(generation: Generation, of: Facts) -> tuple[Choice, ...]:
    """Choices of the Triton kernel that are worth measuring."""
    small, widest = of.tokens <= MOST_SMALL, _widest(of)
    blocks_o, blocks_m = ((32, 64, 128), (max(of.tokens, 8),)) if small else ((64, 128), (64, 128))
    columns_tried, stages_tried = (
        ((widest,), (3, 5)) if small else (sorted({min(widest, 64), widest}), (2, 3, 4))
    )
    found = [choose(generation, of)]
    for block_o, block_m, columns in product(blocks_o, blocks_m, columns_tried):
        most = _splits(generation, of, block_o, block_m, columns)
        found += [
            Choice(block_o, block_m, columns, splits, warps, stages)
            for splits in sorted({max(1, most // 2), most})
            for warps in _warps(block_o, block_m, small)
            for stages in stages_tried
        ]
    return tuple(dict.fromkeys(found))


def _warps(block_o: int, block_m: int, small: bool) -> tuple[int, ...]:
    if small:
        return (2, 4) if block_m <= 32 else (4,)
    return (8,) if block_o * block_m >= 128 * 128 else (4,)


def _widest(of: Facts) -> int:
    """Most columns of a step: a step has one scale per output and plane."""
    return min(PLANE if of.format == "int4" else TILE, of.group or TILE)


def _splits(generation: Generation, of: Facts, block_o: int, block_m: int, columns: int) -> int:
    """Enough programs to keep loads in flight everywhere, with at least two steps each; a power of two.

    Splits write sums in float32, which cost little for a few tokens.
    """
    per_multiprocessor = 3 if of.tokens <= 8 else 1.5 if of.tokens <= MOST_SMALL else 0.75
    wanted = _MULTIPROCESSORS[generation] * per_multiprocessor
    programs = -(-of.outputs // block_o) * -(-of.tokens // block_m)
    steps = -(-of.inputs // TILE) * (PLANE if of.format == "int4" else TILE) // columns
    splits = 1
    while splits < MOST_SPLITS and programs * splits < wanted and steps // (2 * splits) >= 2:
        splits *= 2
    return splits
