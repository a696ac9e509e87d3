"""EngineLoop: the step loop on a thread of its own."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxinfer.engine.client import EngineDeadError
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.deltas import OutputDelta

logger = logging.getLogger(__name__)

T = TypeVar("T")

Sink = Callable[[list[OutputDelta]], None]
"""Takes the news of one turn of the loop, on the loop's thread; it must not wait."""


@dataclass(frozen=True)
class _Command:
    function: Callable[[], Any]
    future: Future[Any]

    def run(self) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                result = self.function()
            except Exception as error:  # handed to the caller, whose command it was
                self.future.set_exception(error)
            else:
                self.future.set_result(result)


class EngineLoop:
    """Runs steps while there is work, and commands between steps. Nothing else may touch the core.

    Args:
        sink: called after every turn (the commands that waited, then one step), with an empty list if there are no
            news.
        ended: called once, as the last thing of the thread, with the reason.
    """

    def __init__(self, core: EngineCore, sink: Sink, ended: Callable[[EngineDeadError], None]) -> None:
        self._core = core
        self._sink = sink
        self._ended = ended
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._error: EngineDeadError | None = None
        self._lock = threading.Lock()
        self._busy = False
        self._progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if self._core.remote is not None:
            self._core.remote.start(self.call)

    @property
    def idle(self) -> bool:
        """Whether nothing runs and no command waits."""
        return not self._busy and self._commands.empty()

    @property
    def error(self) -> EngineDeadError | None:
        """Why the loop ended; None while it runs."""
        return self._error

    @property
    def stalled_for(self) -> float:
        """Seconds without a finished step although work waits; 0 without work."""
        return time.monotonic() - self._progress if self._busy else 0.0

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function on the loop's thread between two steps, in the order of the calls.

        A future that is cancelled before its turn is not run. After the loop's end it holds ``EngineDeadError``.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._error is None:
                self._commands.put(_Command(function, future))
                return future
        future.set_exception(EngineDeadError(str(self._error)))
        return future

    def stop(self) -> None:
        """Ends the loop after the step that runs; requests in flight are dropped. Does not wait."""
        self._commands.put(None)

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the end of the thread; False if it still runs after ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # ---- loop thread

    def _run(self) -> None:
        try:
            while self._run_commands():
                steps = self._core.stats.steps_committed
                self._sink(self._core.step() if self._core.has_work else [])
                if self._core.stats.steps_committed != steps:
                    self._progress = time.monotonic()
            error = EngineDeadError("the engine was shut down")
        except Exception as failure:
            logger.exception("the engine failed")
            error = EngineDeadError(f"{type(failure).__name__}: {failure}")
            error.__cause__ = failure
        self._die(error)

    def _run_commands(self) -> bool:
        """Runs what is queued, waiting for the first command if there is nothing else to do; False to stop."""
        try:
            command = self._next_command()
            while command is not None:
                command.run()
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False

    def _next_command(self) -> _Command | None:
        if self._core.has_work:
            return self._commands.get_nowait()
        self._busy = False
        command = self._commands.get()
        self._progress = time.monotonic()
        self._busy = True
        return command

    def _die(self, error: EngineDeadError) -> None:
        with self._lock:
            self._error = error
            self._busy = False
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None and command.future.set_running_or_notify_cancel():
                command.future.set_exception(EngineDeadError(str(error)))
        if self._core.remote is not None:
            self._core.remote.close()
        self._ended(error)
