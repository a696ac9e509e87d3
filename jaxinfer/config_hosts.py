"""Configuration of an engine whose devices belong to several processes."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from jaxinfer.config_values import Scope


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``.

    Raises:
        ValueError: it has another form.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise ValueError(f"{address!r} is no address; write host:port, for example 10.0.0.1:8476")
    return host, int(port)


def _checked(address: str) -> str:
    split_address(address)
    return address


Address = Annotated[str, AfterValidator(_checked)]


class HostsConfig(Scope):
    """Several processes for one engine, one on each host; see docs/hosts.md. What is absent is taken from the launcher.

    Attributes:
        count: processes; absent without a launcher: one.
        rank: which of them this is. Rank 0 schedules and serves, the others follow.
        coordinator: ``host:port`` of rank 0 for ``jax.distributed``.
        channel: ``host:port`` of rank 0 for the steps; the answers take the next port. Absent: the port behind the
            coordinator's.
        launcher: whose environment is read. ``auto``: LeaderWorkerSet or SLURM if there are more than one process;
            ``none``: nobody's.
        lost_after: seconds of silence after which a process counts as lost, and all others end.
        start_timeout: seconds in which all processes have to appear.
    """

    count: int | None = Field(default=None, ge=1)
    rank: int | None = Field(default=None, ge=0)
    coordinator: Address | None = None
    channel: Address | None = None
    launcher: Literal["auto", "none", "slurm", "lws"] = "auto"
    lost_after: float = Field(default=3.0, ge=1.0)
    start_timeout: float = Field(default=600.0, gt=0)

    @property
    def several(self) -> bool:
        return (self.count or 1) > 1

    @property
    def follows(self) -> bool:
        """Whether this process is one that serves nobody, but computes what rank 0 says."""
        return self.several and bool(self.rank)


def need_one_process(hosts: HostsConfig, what: str) -> None:
    """Raises:
    ValueError: several processes are asked for.
    """
    if hosts.several:
        raise ValueError(
            f"hosts.count is {hosts.count}: {what} runs in one process; several serve (jaxinfer serve)"
        )


def check_hosts(hosts: HostsConfig, devices: int, pipeline: int, engine: str) -> None:
    """Whether so many processes can run what the other scopes ask for.

    Args:
        devices, pipeline: of ``parallel``.
        engine: ``server.engine``.

    Raises:
        ValueError: they cannot; says why, and what can be done.
    """
    count = hosts.count or 1
    if hosts.count is not None and (hosts.rank or 0) >= count:
        raise ValueError(
            f"hosts.rank is {hosts.rank}, but hosts.count is {count}: ranks are 0 to {count - 1}"
        )
    if count == 1:
        return
    if pipeline > 1:
        raise ValueError(
            f"parallel.pipeline is {pipeline} and hosts.count is {count}: the stages of a pipeline belong to one "
            "process; several hosts share layers and experts (parallel.tensor, parallel.expert)"
        )
    if devices % count:
        raise ValueError(
            f"hosts.count is {count}, but parallel.tensor x parallel.expert is {devices}: so many devices cannot be "
            "shared evenly by so many processes. For processes that serve each on its own set hosts.launcher to none"
        )
    if engine == "thread":
        raise ValueError(
            f"server.engine is 'thread' and hosts.count is {count}: a step that waits for a host that is gone can only "
            "be ended with its process; allowed is process"
        )
