"""Several engines as one."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, fields
from itertools import zip_longest
from typing import Any

from jaxinfer.observability.snapshot import EngineSnapshot, TransferStats


def total(snapshots: Sequence[EngineSnapshot]) -> EngineSnapshot:
    """The sum of all counters and gauges; step records and pool maps belong to one engine and are left out."""
    values: dict[str, object] = {}
    for field in fields(EngineSnapshot):
        found = [getattr(snapshot, field.name) for snapshot in snapshots]
        if field.name not in ("steps", "block_owners") and found:
            values[field.name] = _sum(found)
    return EngineSnapshot(**values)  # type: ignore[arg-type]


def _sum(found: Sequence[Any]) -> Any:
    first = found[0]
    if isinstance(first, tuple):
        return tuple(sum(column) for column in zip_longest(*found, fillvalue=0))
    if isinstance(first, dict):
        return dict(sum((Counter(counts) for counts in found), Counter()))
    if isinstance(first, TransferStats):
        columns = zip(*(astuple(value) for value in found))
        return TransferStats(*(_sum(column) for column in columns))
    return sum(found)
