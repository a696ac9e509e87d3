"""Variants of a test, of which few run in `make test`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def variants(every: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Arguments for ``parametrize``: those that are not among ``quick`` are marked slow.

    Args:
        every: values, or tuples of values of several parameters.
        quick: those of them that `make test` runs. Of several parameters, choose combinations in which each value, and
            each pair of values that meet in the code, occurs.
    """
    chosen = list(every)
    assert all(value in chosen for value in quick), "a quick variant is not one of the test"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in quick else pytest.mark.slow,
        )
        for value in chosen
    ]
