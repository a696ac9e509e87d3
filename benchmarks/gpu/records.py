"""Results as lines of JSON, written when they are there: whatever ends a process, nothing measured is lost."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Values = dict[str, Any]


@dataclass
class Case:
    """A measured case.

    Attributes:
        status: "open" while it runs, "ok", "failed" or "skipped".
        reason: why it failed or was skipped.
    """

    part: str
    name: str
    status: str = "open"
    reason: str = ""
    values: Values = field(default_factory=dict)


@dataclass
class Results:
    """All that a file of records says.

    Attributes:
        planned: names of the cases of each part, known when the part has started.
        facts: about the machine and the run.
        missing: package -> what its absence means.
    """

    planned: dict[str, list[str]] = field(default_factory=dict)
    cases: dict[tuple[str, str], Case] = field(default_factory=dict)
    facts: Values = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def of(self, part: str) -> list[Case]:
        return [case for case in self.cases.values() if case.part == part]

    def ok(self, part: str) -> dict[str, Values]:
        """Values of the part's good cases by name."""
        return {case.name: case.values for case in self.of(part) if case.status == "ok"}

    def open_cases(self, part: str) -> list[str]:
        return [case.name for case in self.of(part) if case.status == "open"]

    def untouched(self, part: str) -> list[str]:
        """Planned cases that nobody began."""
        return [name for name in self.planned.get(part, []) if (part, name) not in self.cases]


class Recorder:
    """Appends records to a file; every line is on its way to the disk before a method returns."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def planned(self, part: str, names: Iterable[str]) -> None:
        self._write(kind="planned", part=part, cases=list(names))

    def begin(self, part: str, name: str) -> None:
        self._write(kind="begin", part=part, case=name)

    def end(
        self, part: str, name: str, status: str, values: Mapping[str, Any] | None = None, reason: str = ""
    ) -> None:
        self._write(
            kind="end", part=part, case=name, status=status, reason=reason, values=_plain(values or {})
        )

    def fact(self, name: str, value: Any) -> None:
        self._write(kind="fact", name=name, value=_plain(value))

    def missing(self, package: str, effect: str) -> None:
        self._write(kind="missing", package=package, effect=effect)

    def _write(self, **record: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read(path: Path) -> Results:
    """The results so far; a last line that was cut off by the end of its process is ignored."""
    results = Results()
    if not path.exists():
        return results
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        _add(results, record)
    return results


def _add(results: Results, record: Values) -> None:
    match record["kind"]:
        case "planned":
            results.planned[record["part"]] = record["cases"]
        case "begin":
            key = (record["part"], record["case"])
            results.cases[key] = Case(*key)
        case "end":
            key = (record["part"], record["case"])
            results.cases[key] = Case(*key, record["status"], record["reason"], record["values"])
        case "fact":
            results.facts[record["name"]] = record["value"]
        case "missing":
            results.missing[record["package"]] = record["effect"]


def _plain(value: Any) -> Any:
    """Without NaN and infinity, which JSON has not: None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
