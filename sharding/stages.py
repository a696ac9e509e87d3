"""A pipeline of stages with a thread each: while one works on an item, the next one works on the item before it."""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

Observer = Callable[[int, int, float, float], None]
"""(stage, number of the item, start, stop): called by the stage's thread; times of ``time.perf_counter``."""


@dataclass(frozen=True)
class _Item:
    line: "StageLine"
    number: int
    value: Any
    done: "Future[Any]"


class StageLine:
    """Passes items through all stages, in the order in which they are submitted.

    The threads end when nobody holds the line any more; an item on its way holds it.

    Args:
        stages: from what the stage before returned to what the next one gets. A stage sees one item at a time.
        observe: told when a stage was busy.
    """

    def __init__(self, stages: Sequence[Callable[[Any], Any]], observe: Observer | None = None) -> None:
        self._stages = tuple(stages)
        self._observe = observe
        self._count = 0
        self._queues: tuple[SimpleQueue[_Item | None], ...] = tuple(SimpleQueue() for _ in self._stages)
        for index in range(len(self._stages)):
            threading.Thread(
                target=_work, args=(index, self._queues), name=f"stage-{index}", daemon=True
            ).start()
        weakref.finalize(self, self._queues[0].put, None).atexit = False

    def submit(self, value: Any) -> "Future[Any]":
        """Starts an item; one thread calls it. The future has what the last stage returns, or what a stage raised."""
        item = _Item(self, self._count, value, Future())
        self._count += 1
        self._queues[0].put(item)
        return item.done

    def _run(self, index: int, item: _Item) -> None:
        start = time.perf_counter()
        try:
            value = self._stages[index](item.value)
        except BaseException as error:  # whoever waits for the item is told
            item.done.set_exception(error)
            return
        if self._observe is not None:
            self._observe(index, item.number, start, time.perf_counter())
        if index + 1 == len(self._stages):
            item.done.set_result(value)
        else:
            self._queues[index + 1].put(_Item(self, item.number, value, item.done))


def _work(index: int, queues: "tuple[SimpleQueue[_Item | None], ...]") -> None:
    """The thread of a stage. While it waits it holds no line, whose stages may hold a whole model."""
    while (item := queues[index].get()) is not None:
        item.line._run(index, item)
        del item
    if index + 1 < len(queues):
        queues[index + 1].put(None)
