"""Tuning choices of the Triton attention."""

from dataclasses import dataclass, replace
from pathlib import Path

from pallas_kernels.gpus import Generation
from pallas_kernels.tuning_table import Entry, TuningTable

TABLE = TuningTable(Path(__file__).with_name("tuning.json"))

# Programs that keep all multiprocessors of the largest card of a generation busy, four on each.
_PROGRAMS = {"ampere": 432, "ada": 232, "hopper": 528, "blackwell": 592}
# Fewer rows cost as many registers as four; the products take 16 anyway.
_LEAST_ROWS, _MOST_ROWS = 4, 64
# Values of K that one step of a decode reads.
_CHUNK_VALUES = 8192
_MOST_SPLITS = 64
# Slots that are worth a split. (The table may reach further than contexts do, so the kernel has its own bound.)
_LEAST_SPLIT = 512
# With more tokens the partial results would cost too much memory, and there are enough programs anyway.
_MOST_SPLIT_TOKENS = 512


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        rows: queries of a program, each a token and head; a power of two.
        slots: of the context that one step of the loop reads; a power of two.
        splits: shares of the context, computed by programs of their own and merged; a power of two.
        num_warps, num_stages: of Triton.
    """

    rows: int
    slots: int
    splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Choice:
    """How rows with one token are computed (and batches that have few tokens), and how rows with more."""

    decode: Launch
    tiles: Launch


@dataclass(frozen=True)
class Facts:
    """The static facts of a call that a choice depends on.

    Attributes:
        T, R: tokens and rows.
        context: slots that a block table reaches.
        K, G: KV heads, query heads of each.
        h: head width.
        q_dtype, kv_dtype: names of the dtypes.
        window: see ``reference``.
    """

    T: int
    R: int
    context: int
    K: int
    G: int
    h: int
    q_dtype: str
    kv_dtype: str
    window: int | None


def key(facts: Facts) -> str:
    """Name of the shapes that share a choice."""
    context = _power(facts.context)
    window = "" if facts.window is None or facts.window >= context else f"-w{_power(facts.window)}"
    return (
        f"{facts.q_dtype}-{facts.kv_dtype}-h{facts.h}-k{facts.K}-g{facts.G}"
        f"-t{_power(facts.T)}-r{_power(facts.R)}-c{context}{window}"
    )


def choose(generation: Generation, facts: Facts) -> Choice:
    """The measured choice, or one by rule."""
    entry = TABLE.find(generation, key(facts))
    if entry is not None:
        return from_entry(entry)
    return Choice(_decode(generation, facts), _tiles(generation, facts))


def from_entry(entry: Entry) -> Choice:
    """The choice whose fields are in a table."""
    return Choice(Launch(**entry["decode"]), Launch(**entry["tiles"]))


def candidates(generation: Generation, facts: Facts) -> tuple[Choice, ...]:
    """Choices worth measuring for a shape: of the launch that does most of its work."""
    rule = choose(generation, facts)
    if facts.T <= facts.R:
        found = [
            replace(rule, decode=replace(rule.decode, slots=slots, splits=splits, num_stages=stages))
            for slots in (32, 64)
            for splits in sorted(
                {max(1, rule.decode.splits // 2), rule.decode.splits, 2 * rule.decode.splits}
            )
            for stages in (3, 5)
        ]
    else:
        found = [
            replace(rule, tiles=Launch(rows, slots, rule.tiles.splits, warps, stages))
            for rows, slots, warps in ((32, 32, 4), (64, 32, 4), (64, 64, 4), (64, 64, 8), (128, 64, 8))
            for stages in (2, 3)
        ]
    return tuple(dict.fromkeys((rule, *found)))


def _decode(generation: Generation, facts: Facts) -> Launch:
    """Enough loads in flight: small programs, several on each multiprocessor, and two chunks in flight for each.

    Triton counts the look-up of a block id as a stage of its own, so 5 stages are two chunks and 3 are one.
    """
    rows = min(max(_LEAST_ROWS, _power(facts.G)), _MOST_ROWS)
    programs = min(facts.T, facts.R) * facts.K * -(-facts.G // rows)
    splits = _splits(generation, facts, programs)
    if facts.q_dtype == "float32":
        return Launch(rows, 32, splits, 4, 1)
    slots = 32 if rows > 16 else min(128, max(32, _CHUNK_VALUES // _power(facts.h)))
    return Launch(rows, slots, splits, 4, 5 if generation in ("hopper", "blackwell") else 3)


def _tiles(generation: Generation, facts: Facts) -> Launch:
    """Queries of a KV head together: as many as registers hold, but not many more than a row is likely to have."""
    tokens = -(-facts.T // facts.R)
    rows = min(max(16, _power(facts.G * tokens)), _MOST_ROWS)
    if facts.q_dtype == "float32":
        return Launch(min(rows, 32), 32, 1, 4, 1)
    programs = (facts.T // max(1, rows // facts.G) + facts.R) * facts.K
    splits = _splits(generation, facts, programs) if facts.T <= _MOST_SPLIT_TOKENS else 1
    return Launch(rows, 32, splits, 8 if facts.h > 128 else 4, 3)


def _splits(generation: Generation, facts: Facts, programs: int) -> int:
    reach = facts.context if facts.window is None else min(facts.context, facts.window)
    return min(_power(-(-_PROGRAMS[generation] // programs)), _power(-(-reach // _LEAST_SPLIT)), _MOST_SPLITS)


def _power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
