"""From requests of a client to sequences that the core can queue."""

import threading
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor

from jaxinfer.engine.client import EngineRequest
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.inputs import InputProcessor
from jaxinfer.engine.loop import EngineLoop
from jaxinfer.engine.validation import prepare, takes_long
from jaxinfer.request import RequestError, Sequence

_WORKERS = 2


class Admission:
    """Gets requests into the core, and out of it again, from any thread.

    What takes long (validation of long prompts, grammars) happens on threads of its own, so that neither the caller
    nor the step loop waits for it.
    """

    def __init__(self, inputs: InputProcessor, core: EngineCore, loop: EngineLoop) -> None:
        self._inputs = inputs
        self._core = core
        self._loop = loop
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="jaxinfer-prepare")
        self._preparing: dict[str, threading.Event] = {}
        """By key: set if the request was aborted before it was queued."""

    def submit(self, keys: Seq[str], requests: Seq[EngineRequest]) -> Future[None]:
        """Validates and queues requests, all of them or none; the future holds what was wrong.

        Args:
            keys: ids of the requests in the core.
        """
        result: Future[None] = Future()
        result.set_running_or_notify_cancel()  # what is on its way can not be called back, but only aborted
        aborted = threading.Event()
        for key in keys:
            self._preparing[key] = aborted

        def settle(error: BaseException | None) -> None:
            for key in keys:
                self._preparing.pop(key, None)
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(None)

        def queue(sequences: list[Sequence]) -> None:
            if aborted.is_set():
                raise RequestError("the request was aborted before it was queued")
            self._core.add(sequences)

        def work() -> None:
            try:
                sequences = prepare(self._inputs, requests, keys)
            except Exception as error:  # handed to the caller, whose request it concerns
                settle(error)
            else:
                queued = self._loop.call(lambda: queue(sequences))
                queued.add_done_callback(lambda done: settle(done.exception()))

        if takes_long(requests):
            self._workers.submit(work)
        else:
            work()
        return result

    def abort(self, keys: Seq[str]) -> None:
        """Ends requests in whatever state they are; unknown and finished ones are ignored."""
        for key in keys:
            event = self._preparing.get(key)
            if event is not None:
                event.set()

        def abort() -> None:
            for key in keys:
                self._core.abort(key)

        self._loop.call(abort)

    def close(self) -> None:
        """Takes nothing more; does not wait for what is being prepared."""
        self._workers.shutdown(wait=False, cancel_futures=True)
