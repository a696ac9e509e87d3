"""Tuning choices of the Mosaic attention; they share the table of the Triton backend under keys of their own."""

from dataclasses import dataclass

from pallas_kernels.gpus import Generation
from pallas_kernels.ragged_paged_attention.tuning import TABLE, Facts
from pallas_kernels.ragged_paged_attention.tuning import key as triton_key


@dataclass(frozen=True)
class Choice:
    """How the thread blocks are built.

    Attributes:
        slots: of the context that one step computes; 64 or 128.
        stages: steps whose K and V are in shared memory or on their way; at least 2.
        loader_registers: per thread of the loading warpgroup, a multiple of 8; the computing ones share the rest.
    """

    slots: int
    stages: int
    loader_registers: int = 56


def key(facts: Facts) -> str:
    """Name of the shapes that share a choice."""
    return f"mosaic-{triton_key(facts)}"


def choose(generation: Generation, facts: Facts) -> Choice:
    """The measured choice, or one by rule."""
    entry = TABLE.find(generation, key(facts))
    return _rule(facts) if entry is None else Choice(**entry)


def candidates(generation: Generation, facts: Facts) -> tuple[Choice, ...]:
    """Choices worth measuring for a shape."""
    others = [Choice(64, 3), Choice(64, 4)]
    if facts.window is None:
        others += [Choice(128, 2)] if facts.h > 64 else [Choice(128, 3), Choice(128, 4)]
    return tuple(dict.fromkeys((choose(generation, facts), *others)))


def _rule(facts: Facts) -> Choice:
    """Wide steps keep the tensor cores busy, since Q is read from shared memory once a step; but the masks of a window
    take registers that they need."""
    if facts.window is not None:
        return Choice(64, 3)
    return Choice(128, 2 if facts.h > 64 else 3)
