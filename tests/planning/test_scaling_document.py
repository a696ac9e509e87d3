"""docs/scaling.md says what the planner says now; ``python -m benchmarks.scaling`` writes it."""

import json
import re

import pytest

from benchmarks import scaling

TEXT = scaling.DOCUMENT.read_text()
PUBLISHED = json.loads((scaling.ROOT / "benchmarks/scaling_published.json").read_text())


def section(name: str) -> list[list[str]]:
    """Rows of a table between markers, without its head."""
    found = re.search(f"<!-- begin {name} -->\n(.*?)<!-- end {name} -->", TEXT, re.DOTALL)
    assert found is not None
    rows = [line for line in found[1].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]


def test_assumptions_are_those_of_the_planner() -> None:
    assert section("assumptions") == [list(row) for row in scaling.assumption_rows()]


def test_every_table_is_there() -> None:
    assert len(section("layouts")) == len(scaling.MODELS) * 4
    assert len(section("published")) == len(PUBLISHED["rows"])
    assert {row["source"] for row in PUBLISHED["rows"]} == set(PUBLISHED["sources"])
    assert scaling.IMAGE.is_file()
    for link in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (scaling.DOCUMENT.parent / link).exists(), link


def test_a_million_requests_take_what_the_planner_says() -> None:
    rows = {row[0]: row[1:] for row in section("million")}
    named = dict(scaling.variations(scaling.ALL, scaling.NOTHING))
    assert list(rows) == list(named)
    for label in ("none", "all"):
        plan = scaling.plan("llama-3-8b", "h200", named[label])
        assert rows[label][0] == ("none" if plan is None else f"{plan.devices:,}")


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(PUBLISHED["rows"])))
def test_ratios_to_published_figures(index: int) -> None:
    row = PUBLISHED["rows"][index]
    assert float(section("published")[index][6]) == pytest.approx(
        scaling.predict(row) / row["per_gpu"], abs=0.01
    )
