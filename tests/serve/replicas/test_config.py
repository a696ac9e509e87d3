"""From files and command lines to a configuration, and from there to engines."""

import sys
from pathlib import Path

import pytest
import yaml

from jaxinfer.config_values import ConfigError
from serve.replicas.config import IngressConfig, ReplicasConfig
from serve.replicas.continuation import obstacle
from serve.replicas.run import load, serve_replicas
from serve.replicas.totals import total
from tests.serve.replicas.test_flight import request

CONFIGS = Path(__file__).parents[3] / "configs"
ONE = str(CONFIGS / "smollm2-135m.yaml")


def test_one_engine_becomes_two_replicas():
    config = load(ONE, {"server.port": 9000, "cache.num_blocks": 100, "server.api_keys": ["k"]})
    assert config.models[0].scaling.min_replicas == 2
    assert not config.models[0].scaling.automatic
    assert config.ingress == IngressConfig(port=9000, api_keys=("k",))
    assert config.ingress.server().api_keys == ("k",)
    assert config.engines()[0].cache.num_blocks == 100


def test_files_that_are_shipped(monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    config = load("configs/ray/two_models.yaml", {"server.port": 9000, "ingress.replicas": 3})
    assert (config.ingress.port, config.ingress.replicas) == (9000, 3)
    assert [engine.model.reference.split(":")[0] for engine in config.engines()] == ["package", "hf"]
    application = yaml.safe_load((CONFIGS / "ray" / "smollm2.yaml").read_text())["applications"][0]
    assert ReplicasConfig.of(application["args"]).engines()
    module, builder = application["import_path"].split(":")
    assert (CONFIGS.parent / module.replace(".", "/")).with_suffix(".py").read_text().count(
        f"def {builder}("
    ) == 1


def test_what_does_not_go_together(tmp_path):
    with pytest.raises(ConfigError, match=r"cache.num_blocks: the file describes several engines"):
        load(str(CONFIGS / "ray" / "two_models.yaml"), {"cache.num_blocks": 100})
    twice = {"models": [{"config": ONE}, {"config": ONE}]}
    with pytest.raises(ConfigError, match="several models are served as smollm2-135m"):
        ReplicasConfig.of(twice).engines()
    keys = {"models": [{"config": ONE, "overrides": {"server.api_keys": ["k"]}}]}
    with pytest.raises(ConfigError, match=r"keys are those of the ingress"):
        ReplicasConfig.of(keys).engines()
    with pytest.raises(ConfigError, match=r"ingress\.prot: unknown key; did you mean port"):
        ReplicasConfig.of({"models": [{"config": ONE}], "ingress": {"prot": 1}})


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "serve.replicas.ray_run", raising=False)
    with pytest.raises(ConfigError, match=r"needs the extra ray .*pip install 'jaxinfer\[ray\]'"):
        serve_replicas(load(ONE, {}))


LOOPS = {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}


@pytest.mark.parametrize(
    ("values", "because"),
    [
        ({}, None),
        ({"temperature": 0.7}, None),
        ({"repetition_penalty": 1.2, "logit_bias": {3: 1.0}, "logprobs": 2, "min_tokens": 3}, None),
        ({"seed": 3}, None),
        ({"seed": 3, "temperature": 0.7}, "seed"),
        ({"n": 2}, "n"),
        ({"stop": "x", "detokenize": True}, "stop"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"thinking_token_budget": 4}, "thinking_token_budget"),
        ({"structured_outputs": {"regex": "a*"}}, "structured_outputs"),
        ({"repetition_detection": LOOPS}, "repetition_detection"),
    ],
)
def test_what_may_continue_elsewhere(values, because):
    speculative = load(ONE, {}).engines()[0].speculative
    assert obstacle(request("r", **values), speculative) == because
    typical = speculative.model_copy(update={"acceptance": "typical"})
    assert obstacle(request("r", **values), typical) == because or because is None


def test_totals():
    from jaxinfer.observability.snapshot import EngineSnapshot, TransferStats

    one = EngineSnapshot(running=2, requests_finished={"stop": 1}, accepted_by_depth=(3, 1))
    two = EngineSnapshot(
        running=1,
        requests_finished={"stop": 2, "length": 1},
        accepted_by_depth=(1,),
        transfers=TransferStats(sent_bytes=5, fetch_seconds=0.5),
    )
    both = total([one, two])
    assert both.running == 3
    assert both.requests_finished == {"stop": 3, "length": 1}
    assert both.accepted_by_depth == (4, 1)
    assert both.transfers == TransferStats(sent_bytes=5, fetch_seconds=0.5)
    assert total([]) == EngineSnapshot()
