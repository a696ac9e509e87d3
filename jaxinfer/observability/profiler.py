"""jax.profiler, one profile at a time."""

import threading

import jax

from jaxinfer.request import RequestError


class Profiler:
    """Starts and stops profiles of the whole process; both calls block while files are written."""

    def __init__(self) -> None:
        self._running = False
        self._lock = threading.Lock()

    def start(self, directory: str) -> None:
        """Raises:
        RequestError: a profile is being taken.
        """
        with self._lock:
            if self._running:
                raise RequestError("a profile is being taken already")
            jax.profiler.start_trace(directory)
            self._running = True

    def stop(self) -> None:
        """Raises:
        RequestError: no profile is being taken.
        """
        with self._lock:
            if not self._running:
                raise RequestError("no profile is being taken")
            self._running = False
            jax.profiler.stop_trace()
