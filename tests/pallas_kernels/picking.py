"""How the property tests of the ops pick shapes.

A shape that is new costs a second or two in Pallas's interpreter. So the tests that always run draw their shapes from a
short list, which the backends compile once, and everything else freely; the slow ones draw shapes freely, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st

Shape = TypeVar("Shape")
SLOW_EXAMPLES = 20
"""Shapes that a slow test compiles."""


@dataclass(frozen=True)
class Picks:
    """Where shapes come from.

    Attributes:
        free: any shape, rather than one of the list.
        per_shape: examples for each shape of the list.
        most_free: examples of any shape.
    """

    free: bool
    per_shape: int = 8
    most_free: int = SLOW_EXAMPLES

    def shapes(self, few: Sequence[Shape], every: st.SearchStrategy[Shape]) -> st.SearchStrategy[Shape]:
        return every if self.free else st.sampled_from(few)

    def settings(self, few: Sequence[Any]) -> settings:
        """At 8 examples for each of five shapes, one run in 1500 misses one of them."""
        return settings(
            max_examples=self.most_free if self.free else self.per_shape * len(few), deadline=None
        )


picked_shapes = pytest.mark.parametrize(
    "picks", [Picks(free=False), pytest.param(Picks(free=True), marks=pytest.mark.slow)], ids=["few", "any"]
)
