"""A pipeline of stages with a thread each: while one works on an item, the next one works on the item before it."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

Observer = Callable[[int, int, float, float], None]
"""(stage, number of the item, start, stop): called by the stage's thread; times of ``time.perf_counter``."""


@dataclass(frozen=True)
class _Item:
    number: int
    value: Any
    done: "Future[Any]"


class StageLine:
    """Passes items through all stages, in the order in which they are submitted.

    Args:
        stages: from what the stage before returned to what the next one gets. A stage sees one item at a time.
        observe: told when a stage was busy.
    """

    def __init__(self, stages: Sequence[Callable[[Any], Any]], observe: Observer | None = None) -> None:
        self._stages = tuple(stages)
        self._observe = observe
        self._count = 0
        self._queues: tuple[SimpleQueue[_Item | None], ...] = tuple(SimpleQueue() for _ in self._stages)
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name=f"stage-{index}", daemon=True)
            for index in range(len(self._stages))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, value: Any) -> "Future[Any]":
        """Starts an item; one thread calls it. The future has what the last stage returns, or what a stage raised."""
        item = _Item(self._count, value, Future())
        self._count += 1
        self._queues[0].put(item)
        return item.done

    def close(self) -> None:
        """Ends the threads, after the items that were submitted."""
        self._queues[0].put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, index: int) -> None:
        last = index + 1 == len(self._stages)
        while True:
            item = self._queues[index].get()
            if item is None:
                if not last:
                    self._queues[index + 1].put(None)
                return
            start = time.perf_counter()
            try:
                value = self._stages[index](item.value)
            except BaseException as error:  # whoever waits for the item is told
                item.done.set_exception(error)
                continue
            if self._observe is not None:
                self._observe(index, item.number, start, time.perf_counter())
            if last:
                item.done.set_result(value)
            else:
                self._queues[index + 1].put(_Item(item.number, value, item.done))
