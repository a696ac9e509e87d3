"""The leader's end of the connection between the processes of an engine."""

import logging
import secrets
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec
import numpy as np
import zmq

from jaxinfer.config_hosts import HostsConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.hosts import wire
from jaxinfer.hosts.identity import differences
from jaxinfer.hosts.link import TICK, Exit, GangError, Link, TokenDigest, end_process

logger = logging.getLogger(__name__)

_REMEMBERED = 4096
"""Steps whose digests are kept: followers are never so far behind."""
_RECHECK_TICKS = 4
"""Silence that is enough once a connection was closed."""
_REFUSALS = 6
"""How often a refusal is said, a tick apart: who has called may not have subscribed to the answers yet."""


class LeaderLink(Link):
    """Rank 0: publishes to all, and hears each."""

    def __init__(self, hosts: HostsConfig, facts: dict[str, str], exit: Exit = end_process) -> None:
        super().__init__(hosts, exit)
        self._facts = facts
        self._gang = secrets.token_hex(8)
        self._ranks: dict[str, int] = {}
        self._silent: dict[int, int] = {}
        self._shares: dict[str, dict[int, msgspec.Raw]] = {}
        self._welcome = False
        self._checks_left = 0
        self._number = 0
        self._digest = TokenDigest()
        self._digests: dict[int, int] = {}
        self._beats: dict[int, tuple[int, int]] = {}
        self._thread.start()

    def connect(self) -> None:
        """Waits for all followers.

        Raises:
            ConfigError: one differs, or some have not appeared in ``hosts.start_timeout`` seconds.
        """
        with self._news:
            done = self._news.wait_for(lambda: self._welcome or self._failure, self._hosts.start_timeout)
        if not done:
            missing = sorted(set(range(1, self.count)) - set(self._ranks.values()))
            message = (
                f"{self._hosts.start_timeout:g} s after the start, ranks {missing} of {self.count} have not called "
                f"{self._hosts.channel}; hosts.start_timeout can be raised"
            )
            self._refuse_all(message)
        if not self._welcome:
            assert self._failure is not None
            self._refuse_all(self._failure)

    def _refuse_all(self, message: str) -> NoReturn:
        for _ in range(_REFUSALS - 1):
            self._part(message)
            time.sleep(TICK)
        self.part(message)
        raise ConfigError(message)

    def order(self, make: Callable[[str, int], wire.Work]) -> None:
        """Sends work to all followers.

        Args:
            make: from (gang, number) to the message.
        """
        self._raise_if_ended()
        self._send(make(self._gang, self._number))
        self._number += 1

    def done(self, tokens: np.ndarray) -> None:
        """Notes what a step sampled; to be called in the order of the steps."""
        self._digest.add(tokens)
        self._digests[self._digest.steps] = self._digest.value
        self._digests.pop(self._digest.steps - _REMEMBERED, None)

    def part(self, failure: str | None) -> None:
        """The last message to all followers: the reason if this process fails, None if the work is done."""
        if not self._closing.is_set():
            self._part(failure)
        self._close()

    # ---- see Link

    def _open(self, host: str, port: int) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]":
        return self._bind(zmq.PUB, host, port), self._bind(zmq.PULL, host, port + 1)

    def _share(self, what: str, value: msgspec.Raw) -> None:
        self._take(0, what, value)

    def _take(self, rank: int, what: str, value: msgspec.Raw) -> None:
        with self._news:
            shares = self._shares.setdefault(what, {})
            shares[rank] = value
            if len(shares) < self.count:
                return
            values = [shares[rank] for rank in range(self.count)]
            del self._shares[what]
            self._shared[what] = values
            self._news.notify_all()
        self._send(wire.Shared(self._gang, what, values))

    def _part(self, message: str | None) -> None:
        self._send(wire.Ended(self._gang, message))

    def _on_message(self, data: bytes) -> None:
        try:
            message = wire.decode_answer(data)
        except msgspec.MsgspecError:
            logger.warning("hosts.channel: a message of a stranger was ignored")
            return
        if isinstance(message, wire.Hello):
            self._greet(message)
        rank = self._ranks.get(message.token)
        if rank is None:
            return  # of an earlier gang
        self._silent[rank] = 0
        match message:
            case wire.Beat():
                self._beats.setdefault(rank, (message.steps, message.digest))
            case wire.Share():
                self._take(rank, message.what, message.value)
            case wire.Failed():
                self.end(f"rank {rank} failed: {message.message}")

    def _greet(self, hello: wire.Hello) -> None:
        rank = hello.rank
        if hello.token not in self._ranks:
            if self._welcome:
                return  # somebody who comes too late cannot take part
            if not 0 < rank < self.count or rank in self._ranks.values():
                self.refuse(f"two processes say that they are rank {rank} of {self.count}")
                return
            found = differences(self._facts, hello.facts)
            if found:
                self.refuse(f"rank {rank} differs from rank 0: {found}")
                return
            self._ranks[hello.token] = rank
        if len(self._ranks) == self.count - 1:
            self._send(wire.Welcome(self._gang, list(self._ranks)))
            with self._news:
                self._welcome = True
                self._news.notify_all()

    def _on_disconnect(self) -> None:
        """Somebody's connection was closed: whoever is silent from now on is lost."""
        self._checks_left = 2 * _RECHECK_TICKS
        self._silent = dict.fromkeys(self._silent, 0)

    def _tick(self) -> None:
        if self._welcome:
            self._send(wire.Alive(self._gang))
        closed = self._checks_left > 0
        limit = _RECHECK_TICKS if closed else round(self._hosts.lost_after / TICK)
        self._checks_left = max(0, self._checks_left - 1)
        for rank in self._silent:
            self._silent[rank] += 1
            if self._silent[rank] > limit:
                how = "a connection was closed, and " if closed else ""
                self.end(f"rank {rank} is lost: {how}nothing was heard of it for {limit * TICK:g} s")
                return
        self._compare_digests()

    def _compare_digests(self) -> None:
        for rank, (steps, digest) in list(self._beats.items()):
            if steps <= self._digest.steps:
                del self._beats[rank]
                own = self._digests.get(steps, digest)
                if own != digest:
                    self.end(f"rank {rank} and rank 0 have diverged: their tokens differ before step {steps}")
                    return

    def _raise_if_ended(self) -> None:
        if self._failure is not None:
            time.sleep(2 * TICK)  # the process is about to end
            raise GangError(self._failure)
