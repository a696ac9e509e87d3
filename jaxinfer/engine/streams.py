"""The event-loop side of an engine client: which stream gets which news, and what happens to slow readers."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

from jaxinfer.engine.client import EngineDeadError, EngineRequest
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.request import FinishReason, RequestError


@dataclass(eq=False, slots=True)
class _Entry:
    """One request in flight.

    Attributes:
        key: its id in the core. It is never used twice, so that late news of a request that was left cannot reach
            another one to which the user gave the same id.
        choices: how many it has; those in ``open`` have no last delta yet.
        began_at: the stream's take number when its first news came; None before.
        buffered: tokens and log-probabilities that came after the turn in which the reader was woken, as of the
            stream's take number ``taken``.
    """

    key: str
    request_id: str
    stream: "Stream"
    choices: int
    open: set[int]
    began_at: int | None = None
    buffered: int = 0
    taken: int = 0


class Stream:
    """An ``OutputStream``. News that wait are merged, one delta per choice, when they are taken."""

    def __init__(self, table: "StreamTable") -> None:
        self._table = table
        self._entries: dict[str, _Entry] = {}
        self._pending: list[OutputDelta] = []
        self._pending_since = 0
        self._takes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: EngineDeadError | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The core's ids of the requests that are not finished, in the order of the submit."""
        return tuple(self._entries)

    def __aiter__(self) -> AsyncIterator[list[OutputDelta]]:
        return self

    async def __anext__(self) -> list[OutputDelta]:
        while not self._pending:
            if self._error is not None:
                raise EngineDeadError(str(self._error)) from self._error
            if not self._entries:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._takes += 1
        pending, self._pending = self._pending, []
        return pending if len(pending) == 1 else merge(pending)

    async def aclose(self) -> None:
        self._pending.clear()
        self._table.leave(self)
        self._wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _push(self, delta: OutputDelta, turn: int) -> None:
        if not self._pending:
            self._pending_since = turn
        self._pending.append(delta)
        self._wake()

    def _drop(self, entry: _Entry) -> None:
        """Forgets what waits of the choices that still run; nobody may hold it for a reader that does not come."""
        self._pending = [
            delta
            for delta in self._pending
            if delta.request_id != entry.request_id or delta.index not in entry.open
        ]

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StreamTable:
    """All open streams of a client. Everything happens on one event loop.

    Args:
        limit: tokens, and reported log-probabilities, of a request that may wait for its reader; None for any number.
        abort: tells the engine to abort requests, by the core's ids.
    """

    def __init__(self, limit: int | None, abort: Callable[[Sequence[str]], None]) -> None:
        self._limit = limit
        self._abort = abort
        self._count = itertools.count()
        self._entries: dict[str, _Entry] = {}
        """By the core's id."""
        self._keys: dict[str, str] = {}
        """The core's id of each request id in use."""
        self._turn = 0
        self._idle: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, request_id: str) -> str | None:
        """The core's id of a request in flight."""
        return self._keys.get(request_id)

    def open(self, requests: Sequence[EngineRequest]) -> Stream:
        """A stream for requests that are about to be queued.

        Raises:
            RequestError: an id is in use, or given twice.
        """
        ids: set[str] = set()
        for request in requests:
            if request.request_id in self._keys or request.request_id in ids:
                raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
            ids.add(request.request_id)
        stream = Stream(self)
        for request in requests:
            key = f"{request.request_id}#{next(self._count)}"
            choices = 1 if request.pooling is not None else request.params.n
            entry = _Entry(key, request.request_id, stream, choices, set(range(choices)))
            self._entries[key] = stream._entries[key] = entry
            self._keys[request.request_id] = key
        return stream

    def deliver(self, deltas: Iterable[OutputDelta]) -> None:
        """Hands news to their streams and wakes the readers. To be called at most once per turn of the event loop, so
        that a reader that is ready gets its turn before it counts as slow."""
        self._turn += 1
        overfull: dict[str, _Entry] = {}
        for delta in deltas:
            entry = self._entries.get(delta.request_id)
            if entry is None:
                continue
            delta.request_id = entry.request_id
            if entry.began_at is None:
                entry.began_at = entry.stream._takes
            if delta.finish_reason is not None:
                entry.open.discard(delta.index)
                if not entry.open:
                    self._forget(entry)
            entry.stream._push(delta, self._turn)
            behind = self._limit is not None and entry.stream._pending_since < self._turn
            if behind and self._note_buffered(entry, delta) and entry.open:
                overfull[entry.key] = entry
        if overfull:
            self._cut_off([entry for entry in overfull.values() if entry.open])

    def recall(self, key: str) -> bool:
        """Takes all news of a request in flight back, as if there had been none; does nothing, and returns False, if
        its reader has some of them."""
        entry = self._entries.get(key)
        if entry is None or entry.began_at not in (None, entry.stream._takes):
            return False
        stream = entry.stream
        stream._pending = [delta for delta in stream._pending if delta.request_id != entry.request_id]
        entry.open, entry.began_at, entry.buffered = set(range(entry.choices)), None, 0
        return True

    def leave(self, stream: Stream) -> None:
        """Aborts what a stream's reader leaves behind; nothing if all of it is finished."""
        entries = list(stream._entries.values())
        for entry in entries:
            self._forget(entry)
        if entries:
            self._abort([entry.key for entry in entries])

    def end(self, error: EngineDeadError) -> None:
        """The engine is dead: readers get what waits for them, and then the error."""
        for entry in list(self._entries.values()):
            self._forget(entry)
            entry.stream._error = error
            entry.stream._wake()

    async def drain(self, timeout: float) -> None:
        """Waits until no request is in flight; aborts what is left after ``timeout`` seconds, with a last delta."""
        if not await self._wait_idle(timeout):
            self._abort(list(self._entries))
            await self._wait_idle(1.0)

    async def _wait_idle(self, timeout: float) -> bool:
        if not self._entries:
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle.append(waiter)
        done, _ = await asyncio.wait([waiter], timeout=timeout)
        return bool(done)

    def _note_buffered(self, entry: _Entry, delta: OutputDelta) -> bool:
        """Whether too much has come since a reader that was woken did not."""
        assert self._limit is not None
        stream = entry.stream
        if entry.taken != stream._takes:
            entry.taken, entry.buffered = stream._takes, 0
        entry.buffered += len(delta.token_ids) + sum(len(p.top) + len(p.named) for p in delta.logprobs)
        return entry.buffered > self._limit

    def _cut_off(self, entries: list[_Entry]) -> None:
        for entry in entries:
            message = f"the reader is too slow: more than {self._limit} tokens wait to be taken"
            self._forget(entry)
            entry.stream._drop(entry)
            for index in sorted(entry.open):
                last = OutputDelta(entry.request_id, index, finish_reason=FinishReason.ERROR, error=message)
                entry.stream._push(last, self._turn)
        if entries:
            self._abort([entry.key for entry in entries])

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.key], self._keys[entry.request_id], entry.stream._entries[entry.key]
        if not self._entries:
            for waiter in self._idle:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle.clear()


def merge(deltas: Sequence[OutputDelta]) -> list[OutputDelta]:
    """The same news with one delta per choice. The given deltas are used up."""
    first = deltas[0]
    groups: dict[tuple[str, int], list[OutputDelta]] = {}
    if all(d.index == first.index and d.request_id == first.request_id for d in deltas):  # nearly always
        return [_join(deltas)]
    for delta in deltas:
        groups.setdefault((delta.request_id, delta.index), []).append(delta)
    return [_join(group) for group in groups.values()]


def _join(group: Sequence[OutputDelta]) -> OutputDelta:
    joined = group[-1]
    if len(group) > 1:
        joined.token_ids = tuple(chain.from_iterable([delta.token_ids for delta in group]))
        joined.text = "".join([delta.text for delta in group])
        joined.logprobs = tuple(chain.from_iterable([delta.logprobs for delta in group]))
        scored = [delta.prompt_logprobs for delta in group if delta.prompt_logprobs is not None]
        joined.prompt_logprobs = scored[0] if scored else None
    return joined
