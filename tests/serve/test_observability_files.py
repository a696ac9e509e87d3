"""The Grafana dashboard, the alert rules and docs/operations.md name metrics that the server exports."""

import json
import re
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.observability.snapshot import EngineSnapshot
from serve.metrics import EngineFamilies, EngineState
from tests.support import engines
from tests.support.engines import scripted, sequence_script
from tests.support.servers import running_server
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("metrics")

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "configs/grafana/jaxinfer.json"
ALERTS = ROOT / "configs/prometheus/alerts.yaml"
OPERATIONS = ROOT / "docs/operations.md"
NAME = re.compile(r"jaxinfer:[a-z0-9_]+")
REQUIRED_ALERTS = {
    "JaxinferDown",
    "JaxinferEngineDead",
    "JaxinferQueueGrows",
    "JaxinferTpotOverLimit",
    "JaxinferKVCacheFull",
    "JaxinferErrors",
    "JaxinferRecompiles",
}


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Names of the samples that a server exports after a call, with their labels, and those of models with experts."""
    with running_server(scripted(sequence_script([104, 105]), tokenizer=ByteTokenizer())) as server:
        server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5}).raise_for_status()
        text = server.client.get("/metrics").text
    labels: dict[str, set[str]] = {}
    sparse = EngineState(EngineSnapshot(expert_tokens=(3, 1), expert_peak_tokens={1: 3}), healthy=True)
    families = EngineFamilies(engines.config(), ("model", "0"), sparse).all("jaxinfer:")
    for family in chain(text_string_to_metric_families(text), families):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(GRAFANA.read_text())


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


def check_expression(expression: str, exported: dict[str, set[str]]) -> None:
    """Names are exported, selectors and groupings use labels that they have, and brackets match."""
    names = NAME.findall(expression)
    for name in names:
        assert name in exported, f"{name} is not exported"
    for name, selector in re.findall(r"(jaxinfer:[a-z0-9_]+)\{([^}]*)\}", expression):
        for label in re.findall(r"([a-z_]+)\s*(?:=~|!=|=)", selector):
            assert label in exported[name] | {"instance"}, f"{name} has no label {label}"
    for grouping in re.findall(r"\bby \(([^)]*)\)", expression):
        for label in re.split(r",\s*", grouping):
            assert all(label in exported[name] | {"instance", "job"} for name in names), (
                f"{expression}: {label}"
            )
    for matching in re.findall(r"\bon \(([^)]*)\)", expression):
        # Behind an ingress, one instance has many engines: no pairs of numbers of different ones.
        on = set(re.split(r",\s*", matching)) | {"instance"}
        for name in names:
            assert exported[name] <= on <= exported[name] | {"instance"}, f"{expression}: {name}"
    for left, right in ("()", "[]", "{}"):
        assert expression.count(left) == expression.count(right), expression


def test_grafana_panels_query_exported_metrics(dashboard, exported):
    for panel in panels(dashboard):
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert NAME.search(target["expr"]), panel["title"]
            check_expression(target["expr"], exported)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            assert set(NAME.findall(variable["query"]["query"])) <= set(exported)


def test_grafana_dashboard_can_be_imported(dashboard):
    """Unique ids, no overlap in the grid, a unit and a description on every panel, the data source by variable."""
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        columns = range(place["x"], place["x"] + place["w"])
        cells = set(product(columns, range(place["y"], place["y"] + place["h"])))
        assert not taken & cells, panel["title"]
        taken |= cells
    for panel in panels(dashboard):
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
    assert {v["name"] for v in dashboard["templating"]["list"]} == {"datasource", "model", "instance"}


def test_alert_rules_have_the_shape_and_the_metrics(rules, exported):
    assert {rule["alert"] for rule in rules} >= REQUIRED_ALERTS
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.search(r"(==|>|<)\s*[\d.]+", rule["expr"]), "no limit"
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        check_expression(rule["expr"], exported)


def test_operations_page_lists_every_metric_and_alert(rules, exported):
    text = OPERATIONS.read_text()
    for name in exported:
        family = re.sub(r"_(bucket|sum|count|created)$", "", name)
        if family.startswith("jaxinfer:"):
            assert f"`{family}`" in text or f"`{name}`" in text, f"{family} is not described"
    known = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported} | set(exported)
    assert set(NAME.findall(text)) <= known
    for rule in rules:
        assert f"`{rule['alert']}`" in text


def test_operations_page_links_to_files():
    for link in re.findall(r"\]\(([^)#:]+)\)", OPERATIONS.read_text()):
        assert (OPERATIONS.parent / link).exists(), link
