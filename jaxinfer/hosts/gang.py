"""The processes of an engine, as one of them sees them."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.config import EngineConfig
from jaxinfer.config_hosts import split_address
from jaxinfer.config_values import ConfigError
from jaxinfer.hosts.follower import follow
from jaxinfer.hosts.follower_link import FollowerLink
from jaxinfer.hosts.identity import differences, process_facts
from jaxinfer.hosts.leader import LeaderRunner
from jaxinfer.hosts.leader_link import LeaderLink
from jaxinfer.hosts.link import end_process
from jaxinfer.runner.protocol import Runner
from sharding.layout import Layout
from sharding.processes import join_processes, leave_processes

logger = logging.getLogger(__name__)

_LEAVE = 5.0
"""Seconds that an orderly end of JAX's own connections may take."""


@dataclass(frozen=True)
class Gang:
    """Attributes:
    link: to the other processes; None: there are none.
    """

    link: LeaderLink | FollowerLink | None

    def agree(self, what: str, facts: dict[str, str]) -> None:
        """Waits until all ranks have come to this point.

        Raises:
            ConfigError: the facts are not equal everywhere; names the rank and what differs.
        """
        if self.link is None:
            return
        first, *others = self.link.gather(what, facts)
        for rank, other in enumerate(others, start=1):
            if found := differences(first, other):
                raise ConfigError(f"rank {rank} differs from rank 0: {found}")

    def meet(self, layout: Layout) -> None:
        """Waits until all ranks have come to this point, and connects their devices: no sum waits for one that still
        reads weights, or compiles."""
        if self.link is not None:
            run = layout.compile_sums()
            self.agree("weights", {})
            run()

    def least(self, what: str, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """The least that any rank has, of each number."""
        if self.link is None:
            return numbers
        return tuple(map(min, *self.link.gather(what, numbers)))

    def leader(self, runner: Runner, plan: CompilePlan) -> Runner:
        """The runner of the step loop."""
        return LeaderRunner(self.link, runner, plan) if isinstance(self.link, LeaderLink) else runner

    def follow(self, runner: Runner, plan: CompilePlan) -> None:
        """See ``follower.follow``."""
        assert isinstance(self.link, FollowerLink), "rank 0 leads"
        follow(self.link, runner, plan)

    def on_end(self, tell: Callable[[str], None]) -> None:
        """Whom to tell why this process ends, if another one is lost."""
        if self.link is not None:
            self.link.on_end(tell)

    def part(self, failure: str | None) -> None:
        """Ends the connection: because this process fails, or because the work is done."""
        if self.link is not None:
            self.link.part(failure)


ALONE = Gang(None)


def join(config: EngineConfig) -> Gang:
    """Meets the other processes, and makes one device pool of theirs; to be called before JAX looks for devices.

    Raises:
        ConfigError: they are not there, or differ.
    """
    hosts = config.hosts
    if not hosts.several:
        return ALONE
    assert hosts.count is not None, "see resolve_hosts"
    assert hosts.rank is not None
    assert hosts.coordinator is not None
    kind = FollowerLink if hosts.follows else LeaderLink
    link = kind(hosts, process_facts(config))
    link.connect()
    logger.info("rank %d: all %d processes are there", hosts.rank, hosts.count)
    host, port = split_address(hosts.coordinator)
    try:
        join_processes(host, port, hosts.count, hosts.rank, hosts.start_timeout)
    except Exception as error:
        link.part(f"hosts.coordinator {hosts.coordinator}: {error}")
        raise
    return Gang(link)


def leave(status: int) -> NoReturn:
    """Ends this process, which was one of several. Without errors all leave together; else nobody waits for anybody."""
    if status == 0:
        timer = threading.Timer(_LEAVE, end_process, (status,))
        timer.daemon = True
        timer.start()
        leave_processes()
    end_process(status)
