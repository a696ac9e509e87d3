"""The manifests have the shape that Kubernetes wants; flags, routes, ports, metrics and settings in them exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.config import EngineConfig
from serve.run import FLUSH_TIMEOUT
from tests.deployment.serve_arguments import serve_options
from tests.support.engines import config, scripted, sequence_script
from tests.support.servers import Server, running_server

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs/kubernetes"
CUSTOM = json.loads((ROOT / "tests/data/custom_resources.json").read_text())
KUBERNETES = "1.34"
"""The first version whose pods may sleep before they stop without a feature gate (lifecycle.preStop.sleep)."""
NOT_OURS = {"HF_HOME", "HF_TOKEN"}
"""Variables of huggingface_hub."""
USER = 10001
"""Of the images, see test_docker.py."""

Resource = dict[str, Any]
RESOURCES: list[tuple[str, Resource]] = [
    (path.name, resource)
    for path in sorted(FOLDER.glob("*.yaml"))
    for resource in yaml.safe_load_all(path.read_text())
]


def of_kind(*kinds: str) -> list[Resource]:
    return [resource for _, resource in RESOURCES if resource["kind"] in kinds]


def pod_templates() -> Iterator[tuple[Resource, Resource]]:
    """Each pod template, with the resource it belongs to."""
    for resource in of_kind("Deployment"):
        yield resource, resource["spec"]["template"]
    for resource in of_kind("LeaderWorkerSet"):
        group = resource["spec"]["leaderWorkerTemplate"]
        yield resource, group["leaderTemplate"]
        yield resource, group["workerTemplate"]


TEMPLATES = list(pod_templates())
PODS = [template["spec"] for _, template in TEMPLATES]
CONTAINERS = [container for pod in PODS for container in pod["containers"]]


def validate(resource: Resource) -> None:
    if resource["kind"] not in CUSTOM:
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)
        return
    jsonschema.validate(resource, CUSTOM[resource["kind"]]["schema"])
    if resource["kind"] == "LeaderWorkerSet":
        group = resource["spec"]["leaderWorkerTemplate"]
        for name in ("leaderTemplate", "workerTemplate"):
            template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": group[name]}
            kubernetes_validate.validate(template, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    "resource", [r for _, r in RESOURCES], ids=[f"{name}-{r['kind']}" for name, r in RESOURCES]
)
def test_the_shape_is_valid(resource: Resource) -> None:
    validate(resource)


def test_mistakes_are_found() -> None:
    """The check above sees misspelt fields and wrong types, in our schemas and in Kubernetes' own."""
    pool = json.loads(json.dumps(of_kind("InferencePool")[0]))
    pool["spec"]["endpointPickerRef"]["failuremode"] = "FailOpen"
    with pytest.raises(jsonschema.ValidationError):
        validate(pool)
    deployment = json.loads(json.dumps(of_kind("Deployment")[0]))
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(deployment)
    group = json.loads(json.dumps(of_kind("LeaderWorkerSet")[0]))
    group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["terminationGracePeriodSeconds"] = "90"
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(group)


def test_the_kustomization_lists_files() -> None:
    (kustomization,) = of_kind("Kustomization")
    for name in kustomization["resources"]:
        assert (FOLDER / name).is_file(), name


class TestContainers:
    @pytest.mark.parametrize("container", CONTAINERS, ids=lambda c: c["name"])
    def test_arguments_are_options_of_serve(self, container: Resource) -> None:
        options = serve_options(container["args"])
        assert options["host"] == "0.0.0.0"
        for port in container.get("ports", []):
            assert port["containerPort"] == options["port"]

    @pytest.mark.parametrize("resource_template", TEMPLATES, ids=lambda rt: rt[0]["metadata"]["name"])
    def test_configuration_is_valid_and_mounted(
        self,
        resource_template: tuple[Resource, Resource],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The file that is mounted, with the environment, is a configuration of the engine."""
        pod = resource_template[1]["spec"]
        (container,) = pod["containers"]
        path = Path(serve_options(container["args"])["config"])
        (name,) = [v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v]
        (data,) = [r["data"] for r in of_kind("ConfigMap") if r["metadata"]["name"] == name]
        mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
        assert path.parent == mounts["config"]
        file = tmp_path / "config.yaml"
        file.write_text(data[path.name])
        for variable in container["env"]:
            if variable["name"] not in NOT_OURS:
                assert variable["name"].startswith("JAXINFER_")
                monkeypatch.setenv(variable["name"], variable.get("value", "[a-key]"))
        settings = EngineConfig.load(file)
        environment = {variable["name"]: variable.get("value") for variable in container["env"]}
        for kept in (settings.compile.cache_dir, environment["HF_HOME"]):
            assert Path(str(kept)).is_relative_to(mounts["cache"]), f"{kept} is lost with the pod"
        group = resource_template[0]["spec"].get("leaderWorkerTemplate", {"size": 1})
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert settings.parallel.num_devices == gpus * group["size"]

    def test_volumes_exist(self) -> None:
        claims = {resource["metadata"]["name"] for resource in of_kind("PersistentVolumeClaim")}
        for pod in PODS:
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            for container in pod["containers"]:
                assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
            used = {
                v["persistentVolumeClaim"]["claimName"]
                for v in volumes.values()
                if "persistentVolumeClaim" in v
            }
            assert used <= claims

    def test_a_first_start_does_not_count_as_failed(self) -> None:
        for resource, template in TEMPLATES:
            for container in template["spec"]["containers"]:
                if "startupProbe" not in container:
                    continue
                start = (
                    container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
                )
                if resource["kind"] == "Deployment":
                    assert resource["spec"]["progressDeadlineSeconds"] > start
                else:
                    (data,) = [
                        r["data"]
                        for r in of_kind("ConfigMap")
                        if r["metadata"]["name"] == resource["metadata"]["name"]
                    ]
                    hosts = yaml.safe_load(data["config.yaml"])["hosts"]
                    assert 3600 <= hosts["start_timeout"] <= start

    def test_keys_come_from_the_secret(self) -> None:
        for container in CONTAINERS:
            (keys,) = [v for v in container["env"] if v["name"] == "JAXINFER_SERVER__API_KEYS"]
            assert keys["valueFrom"]["secretKeyRef"]["key"] == "api-keys"

    def test_pods_get_the_time_that_draining_takes(self) -> None:
        for pod in PODS:
            for container in pod["containers"]:
                drain = serve_options(container["args"])["shutdown_timeout"]
                sleep = (
                    container.get("lifecycle", {}).get("preStop", {}).get("sleep", {"seconds": 0})["seconds"]
                )
                assert pod["terminationGracePeriodSeconds"] >= sleep + drain + 5 * FLUSH_TIMEOUT

    def test_pods_have_few_rights(self) -> None:
        for pod in PODS:
            assert pod["securityContext"]["runAsNonRoot"]
            assert pod["securityContext"]["runAsUser"] == USER
            assert pod["automountServiceAccountToken"] is False
            for container in pod["containers"]:
                rights = container["securityContext"]
                assert rights["readOnlyRootFilesystem"]
                assert not rights["allowPrivilegeEscalation"]
                assert rights["capabilities"] == {"drop": ["ALL"]}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    settings = config().model_copy(
        update={"server": config().server.model_copy(update={"vllm_metrics": True})}
    )
    with running_server(scripted(sequence_script([104]), settings)) as server:
        yield server


@pytest.fixture(scope="module")
def exported(server: Server) -> dict[str, set[str]]:
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


class TestRunningServer:
    def test_probed_and_scraped_addresses_answer(self, server: Server) -> None:
        paths = {
            container[name]["httpGet"]["path"]
            for container in CONTAINERS
            for name in ("startupProbe", "livenessProbe", "readinessProbe")
            if name in container
        }
        assert paths == {"/health", "/ready"}
        paths |= {e["path"] for m in of_kind("PodMonitor") for e in m["spec"]["podMetricsEndpoints"]}
        for path in paths:
            assert server.client.get(path).status_code == 200, path
        (route,) = of_kind("HTTPRoute")
        (prefix,) = [m["path"]["value"] for rule in route["spec"]["rules"] for m in rule["matches"]]
        assert server.client.get(f"{prefix}/models").status_code == 200

    def test_autoscaling_reads_exported_metrics(self, exported: dict[str, set[str]]) -> None:
        (scaled,) = of_kind("ScaledObject")
        queries = [t["metadata"]["query"] for t in scaled["spec"]["triggers"] if t["type"] == "prometheus"]
        assert queries
        names = {
            name
            for resource in of_kind("ConfigMap")
            for name in yaml.safe_load(resource["data"]["config.yaml"])["server"]["served_model_names"]
        }
        for query in queries:
            metric, label, value = re.fullmatch(r'sum\(([a-z:_]+)\{([a-z_]+)="([^"]+)"\}\)', query).groups()  # type: ignore[union-attr]
            assert label in exported[metric]
            assert value in names

    def test_metrics_of_the_endpoint_picker_are_exported(self, exported: dict[str, set[str]]) -> None:
        named = re.findall(r"`(vllm:[a-z_]+)`", (FOLDER / "gateway.yaml").read_text())
        assert len(named) == 3
        assert set(named) <= set(exported)


class TestReferences:
    """What one resource says of another one."""

    def test_selectors_find_pods(self) -> None:
        labels = [template["metadata"]["labels"] for _, template in TEMPLATES]
        selectors = [resource["spec"]["selector"] for resource in of_kind("Service")]
        selectors += [
            r["spec"]["selector"]["matchLabels"]
            for r in of_kind("Deployment", "PodDisruptionBudget", "InferencePool")
        ]
        for selector in selectors:
            assert any(selector.items() <= found.items() for found in labels), selector
        (monitor,) = of_kind("PodMonitor")
        (expression,) = monitor["spec"]["selector"]["matchExpressions"]
        assert {found[expression["key"]] for found in labels} == set(expression["values"])

    def test_jobs_have_the_name_that_alerts_look_for(self) -> None:
        """The operator would call it <namespace>/jaxinfer."""
        names = set(re.findall(r'job="([^"]+)"', (ROOT / "configs/prometheus/alerts.yaml").read_text()))
        assert names
        for monitor in of_kind("PodMonitor"):
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                set_names = {r["replacement"] for r in endpoint["relabelings"] if r["targetLabel"] == "job"}
                assert set_names == names

    def test_only_leaders_get_requests(self) -> None:
        (group,) = of_kind("LeaderWorkerSet")
        (service,) = [r for r in of_kind("Service") if r["metadata"]["name"] == group["metadata"]["name"]]
        roles = [
            template["metadata"]["labels"]
            for resource, template in TEMPLATES
            if resource is group
            and service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        ]
        assert [labels["jaxinfer/role"] for labels in roles] == ["leader"]

    def test_ports_have_names_and_numbers_of_containers(self) -> None:
        ports = {port["name"]: port["containerPort"] for c in CONTAINERS for port in c.get("ports", [])}
        for service in of_kind("Service"):
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports)
        for monitor in of_kind("PodMonitor"):
            assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= set(ports)
        for pool in of_kind("InferencePool"):
            assert {port["number"] for port in pool["spec"]["targetPorts"]} <= set(ports.values())

    def test_routes_and_autoscalers_name_resources(self) -> None:
        named = {(resource["kind"], resource.get("metadata", {}).get("name")) for _, resource in RESOURCES}
        (scaled,) = of_kind("ScaledObject")
        target = scaled["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in named
        (route,) = of_kind("HTTPRoute")
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                assert (backend["kind"], backend["name"]) in named
