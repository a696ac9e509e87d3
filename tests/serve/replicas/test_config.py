"""From files and command lines to a configuration, and from there to engines."""

import signal
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from jaxinfer.config_values import ConfigError
from serve.cli import app
from serve.replicas.config import IngressConfig, ReplicasConfig
from serve.replicas.continuation import obstacle
from serve.replicas.gpus import check_room, with_gpus
from serve.replicas.run import load, serve_replicas
from serve.replicas.stop import Stop
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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"hosts.count": 2, "parallel.tensor": 2},
            r"smollm2-135m: hosts.count is 2: a replica is one process",
        ),
        (
            {"disaggregation.role": "prefill"},
            r"role is 'prefill': replicas on a node would all listen at tcp",
        ),
        (
            {"disaggregation.role": "both", "disaggregation.peers": ["tcp://10.0.0.1:5600"]},
            r"role is 'both': .* allowed are none and decode",
        ),
    ],
)
def test_replicas_are_one_process_without_an_address(overrides, message):
    with pytest.raises(ConfigError, match=message):
        ReplicasConfig.of({"models": [{"config": ONE, "overrides": overrides}]}).engines()


def test_replicas_may_ask_prefill_engines():
    overrides = {"disaggregation.role": "decode", "disaggregation.peers": ["tcp://10.0.0.1:5600"]}
    ReplicasConfig.of({"models": [{"config": ONE, "overrides": overrides}]}).engines()


def test_any_free_port_is_not_for_ray(tmp_path):
    with pytest.raises(ConfigError, match=r"server.port is 0, .* allowed are 1 to 65535"):
        load(ONE, {"server.port": 0})
    with pytest.raises(ConfigError, match=r"ingress.port"):
        load(str(CONFIGS / "ray" / "two_models.yaml"), {"server.port": 0})


def test_a_launched_engine_is_no_replica():
    result = CliRunner().invoke(app, ["launch", "--hosts", "2", "--config", ONE, "--replicas", "ray"])
    assert isinstance(result.exception, ConfigError)
    assert "an engine of several processes cannot be a replica" in str(result.exception)


def reserved(available: float, tensor: int = 1, environment=None, **resources) -> float:
    pool = {"config": ONE, "overrides": {"parallel.tensor": tensor}, "resources": resources}
    config = ReplicasConfig.of({"models": [pool]})
    found = with_gpus(config, config.engines(), available, environment or {})
    assert with_gpus(found, found.engines(), available, environment or {}) == found
    return found.models[0].resources.num_gpus


def test_replicas_have_gpus_of_their_own():
    assert reserved(8) == 1
    assert reserved(8, tensor=4) == 4
    assert reserved(8, tensor=2, num_gpus=4) == 4
    assert reserved(0) == reserved(0, num_gpus=0) == 0
    assert reserved(8, environment={"JAX_PLATFORMS": "cpu"}) == 0
    assert reserved(8, num_gpus=0, environment={"JAX_PLATFORMS": "cpu"}) == 0
    with pytest.raises(ConfigError, match=r"num_gpus is 0, but a replica uses 1"):
        reserved(8, num_gpus=0)
    with pytest.raises(ConfigError, match=r"num_gpus is 1, but a replica uses 2"):
        reserved(8, tensor=2, num_gpus=1)


def test_a_machine_has_room_for_the_replicas():
    config = load(ONE, {})
    config = with_gpus(config, config.engines(), 1, {})
    check_room(config, 2)
    with pytest.raises(ConfigError, match=r"need 2 GPUs .* this machine has 1"):
        check_room(config, 1)


def test_signals_end_a_start_and_a_second_one_ends_all():
    stop = Stop()
    with pytest.raises(SystemExit) as caught:
        stop(signal.SIGTERM)
    assert caught.value.code == 143
    stop.started()
    stop(signal.SIGTERM)
    assert stop.wait() == signal.SIGTERM
    with pytest.raises(SystemExit) as caught:
        stop(signal.SIGINT)
    assert caught.value.code == 130


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

    one = EngineSnapshot(
        running=2,
        requests_finished={"stop": 1},
        accepted_by_depth=(3, 1),
        expert_tokens=(4, 2),
        expert_peak_tokens={1: 3},
    )
    two = EngineSnapshot(
        running=1,
        requests_finished={"stop": 2, "length": 1},
        accepted_by_depth=(1,),
        expert_tokens=(1, 1),
        expert_peak_tokens={1: 2},
        transfers=TransferStats(sent_bytes=5, fetch_seconds=0.5),
    )
    both = total([one, two])
    assert both.running == 3
    assert both.requests_finished == {"stop": 3, "length": 1}
    assert both.accepted_by_depth == (4, 1)
    assert both.expert_tokens == (5, 3)
    assert both.expert_peak_tokens == {1: 5}
    assert both.transfers == TransferStats(sent_bytes=5, fetch_seconds=0.5)
    assert total([]) == EngineSnapshot()
