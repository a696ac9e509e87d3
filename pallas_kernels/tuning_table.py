"""Tuning choices of an op, measured per GPU generation and shape: a JSON file that a script fills on a real device."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pallas_kernels.gpus import Generation

Entry = dict[str, Any]


class TuningTable:
    """``{generation: {key: {field: value}}}``; a key is a short text that the op makes of a shape.

    An op falls back to its own rule for what the table does not hold, so an empty table is a valid one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, dict[str, Entry]] = json.loads(path.read_text()) if path.exists() else {}

    def find(self, generation: Generation, key: str) -> Entry | None:
        """The fields of the choice for a shape; None if none was measured."""
        return self._entries.get(generation, {}).get(key)

    def with_entries(self, generation: Generation, entries: Mapping[str, Entry]) -> str:
        """The text of the file with these entries added or replaced."""
        merged = {**self._entries, generation: {**self._entries.get(generation, {}), **entries}}
        return json.dumps(merged, indent=1, sort_keys=True) + "\n"
