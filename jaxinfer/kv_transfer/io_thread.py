"""A thread that owns sockets: everything that touches them runs on it."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

import zmq

logger = logging.getLogger(__name__)


class IOThread:
    """Polls sockets, runs what other threads post, and ticks.

    Args:
        tick: called about every ``interval`` seconds.
        broken: called with what a handler raised; the thread goes on.
    """

    def __init__(
        self, name: str, tick: Callable[[], None], interval: float, broken: Callable[[Exception], None]
    ) -> None:
        self._tick = tick
        self._interval = interval
        self._broken = broken
        self._posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._handlers: dict[zmq.Socket[bytes], Callable[[list[zmq.Frame]], None]] = {}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._stopping = False
        self._closed = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def handle(self, socket: "zmq.Socket[bytes]", handler: Callable[[list[zmq.Frame]], None]) -> None:
        """What to do with messages of a socket; before ``start``."""
        self._handlers[socket] = handler

    def start(self) -> None:
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def post(self, function: Callable[[], None]) -> None:
        """Runs a function on the thread, in the order of the calls; nothing happens after the end."""
        self._posted.put(function)
        with self._closed:
            if not self._stopping:
                with contextlib.suppress(BlockingIOError):  # it is awake for sure
                    os.write(self._wake_write, b"\0")

    def stop(self, last: Callable[[], None]) -> None:
        """Runs what was posted, then ``last``, and closes the sockets. Waits for the end of the thread."""
        if not self.started:
            self._close()
            return
        self.post(lambda: self._end(last))
        self._thread.join(5.0)

    def _end(self, last: Callable[[], None]) -> None:
        last()
        with self._closed:
            self._stopping = True

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        for socket in self._handlers:
            poller.register(socket, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(int(1000 * self._interval)))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            self._guarded(self._run_posted)
            for socket, handler in self._handlers.items():
                if socket in ready and not self._stopping:
                    self._guarded(lambda socket=socket, handler=handler: self._receive(socket, handler))  # type: ignore[misc]
            if not self._stopping:
                self._guarded(self._tick)
        self._close()

    def _receive(self, socket: "zmq.Socket[bytes]", handler: Callable[[list[zmq.Frame]], None]) -> None:
        for _ in range(64):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            handler(frames)

    def _run_posted(self) -> None:
        try:
            while not self._stopping:
                self._posted.get_nowait()()
        except Empty:
            return

    def _guarded(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # one bad message must not end the connections of all
            logger.exception("a connection between engines failed")
            self._broken(error)

    def _close(self) -> None:
        for socket in self._handlers:
            socket.close(linger=500)
        os.close(self._wake_read)
        os.close(self._wake_write)
