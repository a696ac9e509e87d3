"""Where each parameter of a model comes from in a checkpoint."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor whose rows come in periods: of each, rows ``start`` to ``stop``.

    What a projection of every head to two things (key and value of a latent) is split with.
    """

    period: int
    start: int
    stop: int


@dataclass(frozen=True)
class Source:
    """The checkpoint tensors that make up one parameter, by their Hugging Face names.

    Attributes:
        parts: the inner tuples are concatenated along the first axis (q, k, v of a merged projection); if
            there is more than one inner tuple, the results are stacked along a new first axis (experts).
        optional: the parameter may be absent in the checkpoint; then ``fill`` is its value.
        fill: value of an absent optional parameter.
        add: constant added after reading (Gemma's norms store ``weight - 1``).
        rows: the rows that are taken of each tensor; None for all.
    """

    parts: tuple[tuple[str, ...], ...]
    optional: bool = False
    fill: float = 0.0
    add: float = 0.0
    rows: Rows | None = None


def tensor(name: str, **options: float | bool | Rows) -> Source:
    """A parameter that is one checkpoint tensor."""
    return Source(((name,),), **options)  # type: ignore[arg-type]


def concat(*names: str) -> Source:
    """A parameter that is several checkpoint tensors, concatenated along the first axis."""
    return Source((names,))


def stack(rows: list[tuple[str, ...]]) -> Source:
    """A parameter whose first axis stacks concatenations (expert weights)."""
    return Source(tuple(rows))


WeightMap = dict[str, Source]
"""Parameter path in the nnx tree, joined with dots ("layers.0.attention.qkv.weight"), to its source."""
