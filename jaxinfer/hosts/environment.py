"""Which process of how many this is: what launchers say in the environment."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxinfer.config import EngineConfig
from jaxinfer.config_hosts import HostsConfig, split_address
from jaxinfer.config_values import ConfigError, validated

DEFAULT_PORT = 8476
"""Of the coordinator where each group of processes has hosts of its own; the channel takes the next two."""
_SLURM_PORTS = range(61440, 65530, 3)
"""Above the ports that systems give to outgoing connections; three for each job."""


@dataclass(frozen=True)
class Place:
    """What a launcher says.

    Attributes:
        launcher: its name, for messages.
        coordinator: ``host:port``.
    """

    launcher: str
    count: int
    rank: int
    coordinator: str


def resolve_hosts(config: EngineConfig, environment: Mapping[str, str]) -> EngineConfig:
    """The configuration with ``hosts`` as it is: what it does not say is taken from the launcher's environment.

    Raises:
        ConfigError: something is missing, or does not fit what the launcher started.
    """
    given = config.hosts
    place = None if given.count == 1 else find_place(given.launcher, environment)
    if place is None:
        hosts = given.model_copy(update={"count": given.count or 1})
    else:
        hosts = given.model_copy(
            update={
                "count": place.count if given.count is None else given.count,
                "rank": place.rank if given.rank is None else given.rank,
                "coordinator": given.coordinator or place.coordinator,
            }
        )
    hosts = _complete(hosts) if hosts.several else hosts.model_copy(update={"rank": 0})
    tree = config.model_dump(exclude_unset=True) | {"hosts": hosts.model_dump()}
    problems = () if place is None else (f"(hosts: {place.launcher} started {place.count} processes)",)
    try:
        return validated(EngineConfig, tree, config)
    except ConfigError as error:
        raise ConfigError("\n  ".join((str(error), *problems))) from None


def _complete(hosts: HostsConfig) -> HostsConfig:
    missing = [name for name in ("rank", "coordinator") if vars(hosts)[name] is None]
    if missing:
        names = " and ".join(f"hosts.{name}" for name in missing)
        raise ConfigError(
            f"hosts.count is {hosts.count}, but {names} is not set and no launcher says it; set it for each process, "
            "for example --hosts.rank 1 --hosts.coordinator 10.0.0.1:8476"
        )
    if hosts.channel is None:
        host, port = split_address(hosts.coordinator or "")
        shown = f"[{host}]" if ":" in host else host
        hosts = hosts.model_copy(update={"channel": f"{shown}:{port + 1}"})
    return hosts


def find_place(launcher: str, environment: Mapping[str, str]) -> Place | None:
    """What the launcher's environment says.

    Args:
        launcher: see ``HostsConfig``.

    Returns:
        None if this process was started alone, by somebody else, or nobody is to be asked.

    Raises:
        ConfigError: the launcher that is asked for did not start this process, or its environment makes no sense.
    """
    readers = {"lws": _lws, "slurm": _slurm}
    if launcher in readers:
        place = readers[launcher](environment)
        if place is None:
            raise ConfigError(
                f"hosts.launcher is {launcher!r}, but its variables are not in the environment of this process; "
                "allowed are auto, none, slurm, lws"
            )
        return place
    if launcher == "none":
        return None
    found = [
        place for read in readers.values() if (place := read(environment)) is not None and place.count > 1
    ]
    return found[0] if found else None


def _lws(environment: Mapping[str, str]) -> Place | None:
    """LeaderWorkerSet: https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/"""
    address = environment.get("LWS_LEADER_ADDRESS")
    if not address or "LWS_GROUP_SIZE" not in environment:
        return None
    count = _number(environment, "LWS_GROUP_SIZE")
    return Place(
        "LeaderWorkerSet", count, _number(environment, "LWS_WORKER_INDEX"), f"{address}:{DEFAULT_PORT}"
    )


def _slurm(environment: Mapping[str, str]) -> Place | None:
    """A process of a job step: https://slurm.schedmd.com/srun.html. A batch script is none."""
    nodes = environment.get("SLURM_STEP_NODELIST")
    if not nodes or "SLURM_STEP_NUM_TASKS" not in environment:
        return None
    count = _number(environment, "SLURM_STEP_NUM_TASKS")
    port = _SLURM_PORTS[_number(environment, "SLURM_JOB_ID") % len(_SLURM_PORTS)]
    return Place("SLURM", count, _number(environment, "SLURM_PROCID"), f"{first_node(nodes)}:{port}")


def first_node(nodes: str) -> str:
    """The first of a list like ``gpu[007-010,12],login``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST is {nodes!r}, which names no node")
    return "".join(part or "" for part in match.groups())


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise ConfigError(
            f"{name} is {text!r}; allowed is a number. To ignore the launcher, set hosts.launcher none"
        )
    return int(text)
