"""Several engines as one."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from itertools import zip_longest

from jaxinfer.observability.snapshot import EngineSnapshot


def total(snapshots: Sequence[EngineSnapshot]) -> EngineSnapshot:
    """The sum of all counters and gauges; step records and pool maps belong to one engine and are left out."""
    values: dict[str, object] = {}
    for field in fields(EngineSnapshot):
        found = [getattr(snapshot, field.name) for snapshot in snapshots]
        if field.name in ("steps", "block_owners") or not found:
            continue
        if isinstance(found[0], tuple):
            values[field.name] = tuple(sum(column) for column in zip_longest(*found, fillvalue=0))
        elif isinstance(found[0], dict):
            values[field.name] = dict(sum((Counter(counts) for counts in found), Counter()))
        else:
            values[field.name] = sum(found)
    return EngineSnapshot(**values)  # type: ignore[arg-type]
