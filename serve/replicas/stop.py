"""SIGTERM and SIGINT of a process that starts something for minutes and then waits."""

import threading
from types import FrameType


class Stop:
    """A signal handler: a first signal ends ``wait``. Before ``started``, and as a second one, it ends what the process
    is doing with ``SystemExit``.
    """

    def __init__(self) -> None:
        self._waits = False
        self._received: int | None = None
        self._event = threading.Event()

    def __call__(self, signum: int, _: FrameType | None = None) -> None:
        if not self._waits or self._received is not None:
            raise SystemExit(128 + signum)
        self._received = signum
        self._event.set()

    def started(self) -> None:
        self._waits = True

    def wait(self) -> int:
        """Returns the signal."""
        self._event.wait()
        assert self._received is not None
        return self._received
