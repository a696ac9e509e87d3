"""``jaxinfer launch``: all processes of an engine on one machine, replaced together when one of them ends."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "serve.rank", "serve")
WRONG = 2
"""Exit status of a process whose configuration or model is wrong: another start would not help."""
_POLL = 0.05
_GRACE = 10.0
"""Seconds in which the others notice that one process is gone, before they are killed."""
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0
_STEADY = 120.0
"""Seconds after which a gang counts as healthy, and its failure as the first in a row."""


@dataclass(frozen=True)
class _Ended:
    """How a gang ended: statuses by rank, and after how many seconds."""

    statuses: tuple[int, ...]
    seconds: float


class Launcher:
    """Runs one gang after the other. SIGTERM and SIGINT go to rank 0, with which all others end; a second one kills.

    Args:
        restarts: times in a row that a gang is replaced.
        command: runs a rank; the arguments of ``serve`` are added.
    """

    def __init__(
        self, hosts: int, restarts: int, arguments: Sequence[str], command: Sequence[str] = COMMAND
    ) -> None:
        self._hosts = hosts
        self._restarts = restarts
        self._command = (*command, *arguments)
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._stopping = False

    def run(self, sleep: Callable[[float], None] = time.sleep) -> int:
        """Returns the exit status of the launcher: rank 0's if it was told to stop, else that of the first failure."""
        failures = 0
        while True:
            ended = self._run_once()
            status = next((status for status in ended.statuses if status != 0), 0)
            if self._stopping:
                return _as_status(ended.statuses[0])
            if status == 0 or WRONG in ended.statuses:
                return WRONG if WRONG in ended.statuses else 0
            failures = 1 if ended.seconds > _STEADY else failures + 1
            if failures > self._restarts:
                logger.error("the processes have failed %d times in a row: no more restarts", failures)
                return _as_status(status)
            delay = min(_FIRST_DELAY * 2 ** (failures - 1), _LONGEST_DELAY)
            logger.error("all processes are replaced in %g s (%d of %d)", delay, failures, self._restarts)
            sleep(delay)
            if self._stopping:
                return _as_status(status)

    def on_signal(self, signum: int, frame: FrameType | None = None) -> None:
        for rank in self._ranks[:1] if not self._stopping else self._ranks:
            if rank.poll() is None:
                rank.send_signal(signum if not self._stopping else signal.SIGKILL)
        self._stopping = True

    def _run_once(self) -> _Ended:
        started = time.monotonic()
        address = f"127.0.0.1:{free_ports(3)}"
        self._ranks = [self._start(rank, address) for rank in range(self._hosts)]
        if self._stopping:  # the signal came before there was anybody to pass it to
            self._ranks[0].send_signal(signal.SIGTERM)
        try:
            while all(rank.poll() is None for rank in self._ranks):
                time.sleep(_POLL)
            lived = time.monotonic() - started
            for number, rank in enumerate(self._ranks):
                if rank.poll() not in (None, 0):
                    logger.error(
                        "rank %d (process %d) ended with status %d", number, rank.pid, rank.returncode
                    )
            self._wait(time.monotonic() + _GRACE)
        finally:
            for number, rank in enumerate(self._ranks):
                if rank.poll() is None:
                    logger.error("rank %d (process %d) does not end, and is killed", number, rank.pid)
                    rank.kill()
                rank.wait()
                assert rank.stdin is not None
                rank.stdin.close()
        return _Ended(tuple(rank.returncode for rank in self._ranks), lived)

    def _start(self, rank: int, address: str) -> "subprocess.Popen[bytes]":
        where = {"COUNT": self._hosts, "RANK": rank, "COORDINATOR": address, "LAUNCHER": "none"}
        environment = os.environ | {f"JAXINFER_HOSTS__{name}": str(value) for name, value in where.items()}
        # A session of its own: Ctrl-C is for the launcher.
        return subprocess.Popen(self._command, env=environment, stdin=subprocess.PIPE, start_new_session=True)

    def _wait(self, end: float) -> None:
        while time.monotonic() < end and any(rank.poll() is None for rank in self._ranks):
            time.sleep(_POLL)


def launch(hosts: int, restarts: int, arguments: Sequence[str]) -> int:
    """See ``jaxinfer launch``; returns the exit status."""
    launcher = Launcher(hosts, restarts, arguments)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, launcher.on_signal)
    return launcher.run()


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody uses on this machine's own address."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        if first + count <= 65535 and all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _as_status(status: int) -> int:
    """As a shell says it: 128 and the signal's number."""
    return 128 - status if status < 0 else status
