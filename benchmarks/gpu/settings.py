"""What the starting process tells the processes that measure: plain data, as JSON on their command line."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

PARTS = ("ceilings", "kernels", "steps", "throughput", "more-kernels")
"""In the order in which they run: the most important first, and what fills the time that is left last."""

SHARES = {"ceilings": 0.08, "kernels": 0.25, "steps": 0.27, "throughput": 0.32, "more-kernels": 0.08}
"""Of the time for all parts. What a part leaves goes to those after it."""

CASE_SECONDS = {
    "ceilings": 30.0,
    "kernels": 30.0,
    "steps": 75.0,
    "throughput": 150.0,
    "more-kernels": 30.0,
    "tuning": 30.0,
}
"""A case that takes longer hangs; its process is ended."""


@dataclass(frozen=True)
class Settings:
    """One process that measures one part.

    Attributes:
        part: one of ``PARTS``, or "tuning".
        records: file to which results are appended.
        deadline: ``time.time()`` at which the process should be done.
        platform: "cuda" or "cpu".
        smoke: tiny shapes, to see that everything runs.
        cache_directory: JAX's persistent compilation cache.
        cases_from: module with ``all_cases()``.
        pattern: only cases whose full name matches this shell pattern.
        threads: that compile.
        compile_seconds: after which cases that compile together are measured, those that are not ready left out.
        serial: compile every case where it is measured, so that a compiler that aborts the process names its case.
        hide: packages to treat as if they were not installed.
    """

    part: str
    records: Path
    deadline: float
    platform: str = "cuda"
    smoke: bool = False
    cache_directory: str | None = None
    cases_from: str = "pallas_kernels.all_cases"
    pattern: str = "*"
    threads: int = 8
    compile_seconds: float = 60.0
    serial: bool = False
    hide: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"records": str(self.records)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        return cls(**values | {"records": Path(values["records"]), "hide": tuple(values["hide"])})

    def for_part(self, part: str, deadline: float) -> "Settings":
        return replace(self, part=part, deadline=deadline)
