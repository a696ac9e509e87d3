"""What the ends of the connection between the processes of an engine have in common."""

import logging
import os
import sys
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
import numpy as np
import zmq

from jaxinfer.config_hosts import HostsConfig, split_address
from jaxinfer.hosts import wire

logger = logging.getLogger(__name__)

TICK = 0.25
"""Seconds between two signs of life."""
FLUSH = 0.3
"""Seconds that last messages get to leave the process before it ends."""

Exit = Callable[[int], Any]


class GangError(RuntimeError):
    """The processes of an engine do not fit together, or one of them was lost."""


class TokenDigest:
    """A running digest of the tokens of all steps: equal on all ranks, or they have diverged."""

    def __init__(self) -> None:
        self.steps = 0
        self.value = 0

    def add(self, tokens: np.ndarray) -> None:
        self.value = zlib.crc32(np.ascontiguousarray(tokens, np.int32).tobytes(), self.value)
        self.steps += 1


class Link(ABC):
    """One end: a socket to send, one to receive, and a thread that receives, gives signs of life and misses those of
    others. When somebody is lost, that thread ends the process, whatever its other threads wait for.

    Silence is counted in turns of the thread, not by the clock: a process that was stopped for long has not heard
    anything, but neither has it listened.

    Args:
        exit: ends the process; not replaced but by tests.
    """

    def __init__(self, hosts: HostsConfig, exit: Exit) -> None:
        assert hosts.count is not None, "see resolve_hosts"
        assert hosts.rank is not None
        assert hosts.channel is not None
        self.count = hosts.count
        self.rank = hosts.rank
        self._hosts = hosts
        self._exit = exit
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sending = threading.Lock()
        self._news = threading.Condition()
        self._shared: dict[str, list[msgspec.Raw]] = {}
        self._tell: Callable[[str], None] = lambda message: None
        self._failure: str | None = None
        self._closing = threading.Event()
        self._outbox, self._inbox = self._open(*split_address(hosts.channel))
        self._watched = (self._inbox.get_monitor_socket(zmq.EVENT_DISCONNECTED),)
        self._thread = threading.Thread(target=self._run, name="jaxinfer-hosts", daemon=True)

    @property
    def failure(self) -> str | None:
        """Why this process ends; None while it works."""
        return self._failure

    def on_end(self, tell: Callable[[str], None]) -> None:
        """Whom to tell why, before the process ends."""
        self._tell = tell

    def wait_for_verdict(self) -> None:
        """To be called where a computation has failed: if that is because somebody is lost, it does not return."""
        time.sleep(self._hosts.lost_after + 4 * TICK)

    def gather(self, what: str, value: Any) -> list[Any]:
        """What all ranks say under a name, in their order; returns when all have said it.

        Raises:
            GangError: meanwhile somebody was lost.
        """
        self._share(what, msgspec.Raw(wire.encode(value)))
        with self._news:
            self._news.wait_for(lambda: what in self._shared or self._failure is not None)
            if self._failure is not None:
                raise GangError(self._failure)
            values = self._shared.pop(what)
        return [wire.decode(value) for value in values]

    def refuse(self, message: str) -> None:
        """Ends the start: ``connect`` raises the reason."""
        with self._news:
            self._failure = self._failure or message
            self._news.notify_all()

    def end(self, message: str) -> None:
        """Ends the process: says why, tells whoever has to know, and exits with status 1, in whatever state it is."""
        with self._news:
            if self._failure is not None or self._closing.is_set():
                return
            self._failure = message
            self._news.notify_all()
        logger.error("rank %d of %d ends: %s", self.rank, self.count, message)
        self._part(message)
        self._tell(message)
        time.sleep(FLUSH)
        sys.stderr.flush()
        self._exit(1)

    # ---- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._inbox, *self._watched):
            poller.register(socket, zmq.POLLIN)
        due = 0.0
        try:
            while not self._closing.is_set():
                ready = dict(poller.poll(int(1000 * TICK)))
                if self._inbox in ready:
                    self._receive()
                for monitor in self._watched:
                    if monitor in ready:
                        monitor.recv_multipart()
                        self._on_disconnect()
                if time.monotonic() >= due:
                    due = time.monotonic() + TICK
                    self._tick()
        except Exception as error:
            logger.exception("the connection between hosts failed")
            self.end(f"{type(error).__name__}: {error}")

    def _receive(self) -> None:
        while not self._closing.is_set():
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(data)

    def _send(self, message: wire.Answer | wire.Order) -> None:
        data = wire.encode(message)
        with self._sending:
            if not self._outbox.closed:
                self._outbox.send(data)

    def _close(self) -> None:
        """Ends the thread, and waits until what was sent has left."""
        self._closing.set()
        if self._context.closed:
            return
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._inbox.disable_monitor()
        for socket in (*self._watched, self._inbox):
            socket.close(linger=0)
        with self._sending:
            self._outbox.close(linger=int(1000 * FLUSH))
        self._context.term()

    def _bind(self, kind: int, host: str, port: int) -> "zmq.Socket[bytes]":
        """Where followers find the leader: on all addresses, as names in clusters need not be this host's own."""
        host = "127.0.0.1" if host == "localhost" else host
        local = host.startswith("127.") or host == "::1"
        socket = self._socket(kind)
        address = f"tcp://{_shown(host) if local else '*'}:{port}"
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ValueError(f"hosts.channel: {address} cannot be listened on: {error}") from None
        return socket

    def _connect(self, kind: int, host: str, port: int) -> "zmq.Socket[bytes]":
        socket = self._socket(kind)
        socket.connect(f"tcp://{_shown(host)}:{port}")
        return socket

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set(zmq.IPV6, 1)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        return socket

    # ---- what differs

    @abstractmethod
    def _open(self, host: str, port: int) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]":
        """The sockets to send and to receive."""

    @abstractmethod
    def _share(self, what: str, value: msgspec.Raw) -> None:
        """This rank's part of a ``gather``."""

    @abstractmethod
    def _part(self, message: str) -> None:
        """Tells the others that this process ends, and why."""

    @abstractmethod
    def _on_message(self, data: bytes) -> None: ...

    @abstractmethod
    def _on_disconnect(self) -> None: ...

    @abstractmethod
    def _tick(self) -> None: ...


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def end_process(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
