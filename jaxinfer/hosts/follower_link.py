"""A follower's end of the connection between the processes of an engine."""

import queue
import secrets
import threading

import msgspec
import numpy as np
import zmq

from jaxinfer.config_hosts import HostsConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.hosts import wire
from jaxinfer.hosts.link import TICK, Exit, Link, TokenDigest, end_process


class FollowerLink(Link):
    """Ranks from 1 on: hears the leader only, and tells it only."""

    def __init__(self, hosts: HostsConfig, facts: dict[str, str], exit: Exit = end_process) -> None:
        super().__init__(hosts, exit)
        self._token = secrets.token_hex(8)
        self._hello = wire.Hello(self._token, self.rank, facts)
        self._gang: str | None = None
        self._silent = 0
        self._number = 0
        self._work: queue.SimpleQueue[wire.Work | None] = queue.SimpleQueue()
        self._digest = TokenDigest()
        self._counting = threading.Lock()
        self._thread.start()

    def connect(self) -> None:
        """Calls the leader until it answers.

        Raises:
            ConfigError: some process differs from the leader, or it has not answered in ``hosts.start_timeout``
                seconds.
        """
        with self._news:
            done = self._news.wait_for(lambda: self._gang or self._failure, self._hosts.start_timeout)
        if not done:
            raise ConfigError(
                f"rank 0 has not answered at {self._hosts.channel} in {self._hosts.start_timeout:g} s; is it started, "
                "and do all processes know the same hosts.coordinator?"
            )
        if self._failure is not None:
            raise ConfigError(self._failure)

    def next(self, timeout: float | None = None) -> wire.Work | None:
        """The next work, in the order in which the leader dispatches it; None: there will be none.

        Raises:
            queue.Empty: there was none for ``timeout`` seconds.
        """
        return self._work.get(timeout=timeout)

    def done(self, tokens: np.ndarray) -> None:
        """Notes what a step sampled; to be called in the order of the steps."""
        with self._counting:
            self._digest.add(tokens)

    def part(self, failure: str | None) -> None:
        """Leaves: tells the leader why if this process fails."""
        if failure is not None and not self._closing.is_set():
            self._part(failure)
        self._close()

    # ---- see Link

    def _open(self, host: str, port: int) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]":
        inbox = self._connect(zmq.SUB, host, port)
        inbox.subscribe(b"")
        return self._connect(zmq.PUSH, host, port + 1), inbox

    def _share(self, what: str, value: msgspec.Raw) -> None:
        self._send(wire.Share(self._token, what, value))

    def _part(self, message: str) -> None:
        self._send(wire.Failed(self._token, message))

    def _on_message(self, data: bytes) -> None:
        self._silent = 0
        message = wire.decode_order(data)
        if self._gang is None:
            if isinstance(message, wire.Ended):
                self.refuse(str(message.failure))
            elif isinstance(message, wire.Welcome) and self._token in message.tokens:
                with self._news:
                    self._gang = message.gang
                    self._news.notify_all()
            return
        if message.gang != self._gang:
            self.end("rank 0 was started anew: this process belongs to a gang that is gone")
            return
        match message:
            case wire.Shared():
                with self._news:
                    self._shared[message.what] = message.values
                    self._news.notify_all()
            case wire.Ended(failure=None):
                self._closing.set()  # from now on rank 0 may go
                self._work.put(None)
            case wire.Ended():
                self.end(str(message.failure))
            case wire.Step() | wire.Masks() | wire.Moves():
                self._take(message)

    def _take(self, work: wire.Work) -> None:
        if work.number != self._number:
            self.end(f"message {work.number} of rank 0 has come where {self._number} was due: some are lost")
            return
        self._number += 1
        self._work.put(work)

    def _on_disconnect(self) -> None:
        if self._gang is not None:
            self.end("rank 0 is lost: its connection was closed")

    def _tick(self) -> None:
        if self._gang is None:
            self._send(self._hello)
            return
        with self._counting:
            beat = wire.Beat(self._token, self._digest.steps, self._digest.value)
        self._send(beat)
        self._silent += 1
        if self._silent * TICK > self._hosts.lost_after:
            self.end(f"rank 0 is lost: nothing was heard of it for {self._hosts.lost_after:g} s")
