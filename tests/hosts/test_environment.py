"""Which process of how many: from options, from launchers, and what does not fit."""

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.config_hosts import need_one_process
from jaxinfer.config_values import ConfigError
from jaxinfer.hosts.environment import find_place, first_node, resolve_hosts

LWS = {"LWS_LEADER_ADDRESS": "gang-0.gang.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "0",
}


def config(**values: object) -> EngineConfig:
    return EngineConfig.load("tiny", {"parallel.tensor": 2, **values})


def test_one_process_without_a_launcher() -> None:
    hosts = resolve_hosts(config(), {}).hosts
    assert (hosts.count, hosts.rank, hosts.several, hosts.follows) == (1, 0, False, False)


def test_leader_worker_set() -> None:
    hosts = resolve_hosts(config(), LWS).hosts
    assert (hosts.count, hosts.rank, hosts.follows) == (2, 1, True)
    assert hosts.coordinator == "gang-0.gang.default:8476"
    assert hosts.channel == "gang-0.gang.default:8477"


def test_slurm() -> None:
    hosts = resolve_hosts(config(), SLURM).hosts
    assert (hosts.count, hosts.rank, hosts.follows) == (2, 0, False)
    assert hosts.coordinator == "gpu007:61461"


def test_a_batch_script_is_no_gang() -> None:
    script = {name: value for name, value in SLURM.items() if "STEP" not in name} | {"SLURM_NTASKS": "2"}
    assert resolve_hosts(config(), script).hosts.count == 1


def test_options_win_over_the_launcher() -> None:
    given = {"hosts.rank": 0, "hosts.coordinator": "10.0.0.1:99", "hosts.channel": "[::1]:5"}
    hosts = resolve_hosts(config(**given), LWS).hosts
    assert (hosts.count, hosts.rank, hosts.coordinator, hosts.channel) == (2, 0, "10.0.0.1:99", "[::1]:5")
    assert resolve_hosts(config(**{"hosts.launcher": "none"}), LWS).hosts.count == 1
    assert resolve_hosts(config(**{"hosts.count": 1}), LWS).hosts.count == 1


def test_the_environment_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a Ray actor, or a script, sets."""
    for name, value in {"COUNT": "2", "RANK": "1", "COORDINATOR": "10.0.0.1:8476"}.items():
        monkeypatch.setenv(f"JAXINFER_HOSTS__{name}", value)
    hosts = resolve_hosts(config(), {}).hosts
    assert (hosts.rank, hosts.channel, hosts.follows) == (1, "10.0.0.1:8477", True)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu7", "gpu7"), ("gpu7,gpu8", "gpu7"), ("gpu[007-010,12],login", "gpu007"), ("a[3,5]-x,b", "a3-x")],
)
def test_first_node(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    ("values", "environment", "said"),
    [
        ({"hosts.count": 2}, {}, "hosts.rank and hosts.coordinator is not set"),
        ({"hosts.count": 2, "hosts.rank": 1}, {}, "hosts.coordinator is not set"),
        ({"hosts.launcher": "slurm"}, {}, "'slurm', but its variables are not in the environment"),
        ({}, LWS | {"LWS_GROUP_SIZE": "two"}, "LWS_GROUP_SIZE is 'two'"),
        ({"parallel.tensor": 3}, LWS, "cannot be shared evenly"),
        ({"parallel.tensor": 3}, LWS, "LeaderWorkerSet started 2 processes"),
        ({"hosts.rank": 2}, LWS, "ranks are 0 to 1"),
    ],
)
def test_what_is_missing_or_does_not_fit(
    values: dict[str, object], environment: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_hosts(config(**values), environment)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hosts.count": 2, "hosts.rank": 2}, "ranks are 0 to 1"),
        ({"hosts.count": 2, "parallel.pipeline": 2}, "belong to one process"),
        ({"hosts.count": 2, "parallel.context": 2}, "share a context belong to one process"),
        ({"hosts.count": 2, "server.engine": "thread"}, "allowed is process"),
        ({"hosts.count": 2, "speculative.model": "tiny", "speculative.drafter": "model"}, "one device"),
        ({"hosts.coordinator": "10.0.0.1"}, "write host:port"),
        ({"hosts.coordinator": "10.0.0.1:70000"}, "write host:port"),
    ],
)
def test_what_several_hosts_do_not_do(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**values)


def test_offline_engines_are_one_process() -> None:
    hosts = resolve_hosts(config(), LWS).hosts
    with pytest.raises(ValueError, match=r"hosts.count is 2: LLM runs in one process"):
        need_one_process(hosts, "LLM")


def test_nobody_is_asked() -> None:
    assert find_place("none", LWS) is None
    assert find_place("auto", LWS | {"LWS_GROUP_SIZE": "1"}) is None
