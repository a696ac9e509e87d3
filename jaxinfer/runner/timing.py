"""How long the programs of a runner take."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from jaxinfer.batch.compile_plan import CompilePlan


@dataclass(frozen=True)
class ProgramSeconds:
    """Seconds of the compiled programs, on padding.

    Attributes:
        layers: by token bucket T.
        sampling: head and sampler by row bucket P.
    """

    layers: Mapping[int, float]
    sampling: Mapping[int, float]

    @classmethod
    def guessed(cls, plan: CompilePlan) -> Self:
        """Of a device that was not measured: only the ratios of the times mean something. More tokens cost rather too
        much, so that steps with many of them are tried when the smaller ones paid."""
        return cls({t: 1 + t / 16 for t in plan.token_buckets}, dict.fromkeys(plan.row_buckets, 0.0))
