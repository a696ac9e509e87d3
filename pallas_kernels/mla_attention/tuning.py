"""Tuning choices of the latent attention."""

from dataclasses import dataclass, replace
from pathlib import Path

from pallas_kernels.gpus import Generation
from pallas_kernels.tuning_table import TuningTable

_TABLE = TuningTable(Path(__file__).with_name("tuning.json"))
# Programs that fill the largest card of a generation: two on each multiprocessor.
_PROGRAMS = {"ampere": 216, "ada": 116, "hopper": 264, "blackwell": 296}


@dataclass(frozen=True)
class Choice:
    """How a program works. All sizes are powers of two.

    Attributes:
        heads: query heads of a tile; the latents are read once for each tile.
        slots: of the context that one step of the loop reads.
        splits: shares of the context, computed by programs of their own and merged.
        num_warps, num_stages: of Triton.
    """

    heads: int
    slots: int
    splits: int
    num_warps: int
    num_stages: int


def key(heads: int, latent: int, pool_dtype: str, tokens: int) -> str:
    """Name of a shape in the table; token counts are rounded up to a power of two."""
    return f"H{heads}-r{latent}-{pool_dtype}-T{_power_of_two(tokens)}"


def choose(
    generation: Generation, heads: int, latent: int, q_dtype: str, pool_dtype: str, tokens: int
) -> Choice:
    """The measured choice, or a rule: a tile of at most 32 heads, and as many splits as the card has room for.

    The number of splits depends on shapes only, so that a row's sums do not depend on the contexts of others.
    """
    entry = _TABLE.find(generation, key(heads, latent, pool_dtype, tokens))
    if entry is not None:
        return Choice(**entry)
    tile = _tile(generation, heads, latent, q_dtype)
    programs = tokens * -(-heads // tile.heads)
    splits = max(1, min(16, _PROGRAMS[generation] // programs))
    return Choice(tile.heads, tile.slots, 1 << (splits.bit_length() - 1), tile.num_warps, tile.num_stages)


def candidates(
    generation: Generation, heads: int, latent: int, q_dtype: str, pool_dtype: str, tokens: int
) -> tuple[Choice, ...]:
    """Choices worth measuring for a shape."""
    found = [choose(generation, heads, latent, q_dtype, pool_dtype, tokens)]
    tile = found[0]
    found += [
        replace(tile, splits=splits, num_stages=stages)
        for splits in sorted({1, 2, 4, 8, tile.splits})
        for stages in sorted({3, tile.num_stages})
    ]
    return tuple(dict.fromkeys(found))


def _tile(generation: Generation, heads: int, latent: int, q_dtype: str) -> Choice:
    """Tile sizes that compile without spills within shared memory.

    Latents are read through block ids that are loaded first: two stages pass before a chunk is asked for, so 5 stages
    keep one chunk in flight while another is computed; 3 have none. On Hopper 64 heads would use wgmma, but their
    output fills 128 registers of each of 256 threads, and the rest spills (24 to 180 bytes with jax 0.11.2).
    """
    if q_dtype == "float32":
        return Choice(16, 16, 1, 8, 1)
    if heads <= 16:
        return Choice(16, 32, 1, 8, 5)
    return Choice(32, 32, 1, 8, 3 if generation == "ada" else 5)


def _power_of_two(n: int) -> int:
    return 1 << (max(n, 1) - 1).bit_length()
