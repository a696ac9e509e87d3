"""The API process' end of the connection: a child process and two local sockets in a private directory."""

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from jaxinfer.config import EngineConfig
from serve.process import wire

ENGINE_COMMAND = (sys.executable, "-m", "serve.process.main")
_BATCH = 64
"""Messages taken in one turn of the event loop."""
_REAP_TIMEOUT = 1.0
"""Seconds that a process may take from closing its files to its end."""


class EngineProcess:
    """Starts the child and passes messages on. Everything happens on one event loop.

    Args:
        command: runs the engine process; the private directory is added.
        on_messages: gets what arrived, as often as once per turn of the event loop.
        on_exit: called once, when the child is gone and its last messages were passed on.
    """

    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str],
        on_messages: Callable[[list[wire.Message]], None],
        on_exit: Callable[[], None],
    ) -> None:
        self._on_messages = on_messages
        self._on_exit = on_exit
        self._event_loop = asyncio.get_running_loop()
        self._directory = Path(tempfile.mkdtemp(prefix="jaxinfer-"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._commands = self._bind(zmq.PUSH, wire.COMMANDS)
        self._news = self._bind(zmq.PULL, wire.NEWS)
        setup = wire.Setup(config.model_dump_json(), logging.getLogger().getEffectiveLevel())
        _write_private(self._directory / wire.SETUP, wire.encode(setup))
        self._alive, alive = os.pipe()
        try:
            # The child's end of the first pipe closes when this process ends, ours of the second when the child does.
            self._process = subprocess.Popen(
                [*command, str(self._directory)],
                stdin=subprocess.PIPE,
                pass_fds=(alive,),
                start_new_session=True,
            )
        finally:
            os.close(alive)
        self._descriptor = int(self._news.get(zmq.FD))
        self._event_loop.add_reader(self._descriptor, self._read)
        self._event_loop.add_reader(self._alive, self._exited)
        self._event_loop.call_soon(self._read)
        self._closed = False
        self._reaping: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def send(self, command: wire.Command) -> None:
        """Sends without waiting; nothing happens if the child is gone."""
        if self._closed:
            return
        try:
            self._commands.send(wire.encode(command), zmq.NOBLOCK)
        except zmq.Again:  # there is no other end
            if self.status is None:
                raise

    def kill(self) -> None:
        self._process.kill()

    async def close(self, timeout: float) -> None:
        """Waits for the end of the child, kills it after ``timeout`` seconds, and leaves nothing behind."""
        if self._closed:
            return
        try:
            await asyncio.to_thread(self._process.wait, timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._closed = True
        self._event_loop.remove_reader(self._descriptor)
        self._event_loop.remove_reader(self._alive)
        os.close(self._alive)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._commands.close(linger=0)
        self._news.close(linger=0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _bind(self, kind: int, name: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.bind(f"ipc://{self._directory / name}")
        return socket

    def _read(self) -> None:
        """Takes what is there. The descriptor tells of new messages only once they all were taken, so what is left
        over is for the next turn."""
        if self._closed:
            return
        try:
            messages = self._take(_BATCH)
        except msgspec.MsgspecError:  # without its news nobody may wait for this engine
            self.kill()
            raise
        if len(messages) == _BATCH:
            self._event_loop.call_soon(self._read)
        if messages:
            self._on_messages(messages)

    def _take(self, limit: int | None = None) -> list[wire.Message]:
        messages: list[wire.Message] = []
        with contextlib.suppress(zmq.Again):
            while limit is None or len(messages) < limit:
                messages.append(wire.decode_message(self._news.recv(zmq.NOBLOCK)))
        return messages

    def _exited(self) -> None:
        self._event_loop.remove_reader(self._alive)
        self._reaping = asyncio.ensure_future(self._reap())

    async def _reap(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, _REAP_TIMEOUT)
        messages = [] if self._closed else self._take()
        if messages:
            self._on_messages(messages)
        self._on_exit()


def _write_private(path: Path, data: bytes) -> None:
    """The directory is private; the file is so too, as it may hold keys."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
