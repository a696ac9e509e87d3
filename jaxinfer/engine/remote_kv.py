"""Prefill and decode in different engines, as the step loop sees it: blocks that come, and blocks that go."""

import itertools
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from jaxinfer.kv_transfer.connector import (
    Array,
    Arrived,
    Asked,
    Blocks,
    Cancelled,
    Ended,
    Event,
    Job,
    KVConnector,
)
from jaxinfer.kv_transfer.messages import Ask
from jaxinfer.observability.snapshot import TransferStats
from jaxinfer.request import FinishReason, QueueFullError, RequestError, Sequence, Status
from jaxinfer.scheduler.fetching import Fetch
from jaxinfer.scheduler.plan import BlockRead, StepPlan
from jaxinfer.scheduler.scheduler import Scheduler

Call = Callable[[Callable[[], None]], Any]
"""Runs a function on the thread of the step loop, between two steps."""


class BlockWriter(Protocol):
    """A runner whose blocks can be written."""

    def write_blocks(
        self, group: int, layers: tuple[int, ...], blocks: Seq[int], contents: tuple[Array, ...]
    ) -> None:
        """Writes K and V of blocks, before the next step.

        Args:
            contents: K and V of each layer, ``[C, K, S, h]`` with whole logical heads.
        """
        ...


@dataclass(frozen=True)
class JobQueue:
    """How a prompt that another engine asks for becomes a request of this one.

    Attributes:
        prepare: validates and makes the sequences; on any thread. Raises RequestError.
        add, abort: as those of the core; on its thread.
    """

    prepare: Callable[[str, Ask], list[Sequence]]
    add: Callable[[list[Sequence]], None]
    abort: Callable[[str], None]


@dataclass
class _Saving:
    """A prompt that is computed for another engine; ``next`` is the first block of each group that it still lacks."""

    job: Job
    stop: int
    next: list[int]


class RemoteKV:
    """Connects the scheduler's fetches, and requests for others, with a connector.

    All methods but ``on_event`` and ``drain`` are called on the thread of the step loop, or before there is one.
    """

    def __init__(
        self, connector: KVConnector, scheduler: Scheduler, writer: BlockWriter, jobs: JobQueue
    ) -> None:
        self._connector = connector
        self._scheduler = scheduler
        self._writer = writer
        self._jobs = jobs
        self._lock = threading.Lock()
        self._call: Call | None = None
        self._early: list[Callable[[], None]] = []
        self._numbers = itertools.count(1)
        self._fetches: dict[int, Fetch] = {}
        self._number_of: dict[Sequence, int] = {}
        self._saving: dict[Sequence, _Saving] = {}
        self._has_news = False
        self._failure: Exception | None = None

    @property
    def stats(self) -> TransferStats:
        return self._connector.stats

    @property
    def has_news(self) -> bool:
        """Whether a step is worth while, even if the one before had nothing to compute."""
        return self._has_news or self._scheduler.fetches.has_news

    def connect(self) -> None:
        """Raises:
        ConfigError: see ``KVConnector.start``.
        """
        self._connector.start(self.on_event)

    def start(self, call: Call) -> None:
        """Hands events to the step loop from now on, those first that came before."""
        with self._lock:
            self._call = call
            for run in self._early:
                call(run)
            self._early.clear()

    def drain(self) -> Future[None]:
        """See ``KVConnector``; on any thread."""
        return self._connector.drain()

    def close(self) -> None:
        self._connector.close()

    def may_fetch(self, seq: Sequence) -> bool:
        """Whether another engine may compute the prompt of a new sequence: not if all of its positions are looked at
        here, nor if it is computed for another engine."""
        request = seq.request
        whole = request.params.skip_reading_prefix_cache or request.pooling is not None
        return not whole and seq.max_tokens > 0 and seq not in self._saving

    # ---- the step

    def scheduled(self, plan: StepPlan | None) -> StepPlan | None:
        """Starts and cancels what the scheduler decided, and has the step's full blocks read for those who asked."""
        self._has_news = False
        if self._failure is not None:
            raise self._failure
        for seq in self._scheduler.fetches.take_dropped():
            number = self._number_of.pop(seq, None)
            if number is not None:
                del self._fetches[number]
                self._connector.cancel(number)
        for fetch in self._scheduler.fetches.take_started():
            self._load(fetch)
        if plan is None or not self._saving:
            return plan
        return replace(plan, reads=tuple(self._reads(plan)))

    def ended(self, seq: Sequence, reason: FinishReason, error: str | None) -> bool:
        """Takes note of the end of a sequence; whether it was computed for another engine, which gets to know."""
        saving = self._saving.pop(seq, None)
        if saving is None:
            return False
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            self._connector.finished(saving.job, error or "the prefill was aborted")
        else:
            assert all(number >= saving.stop for number in saving.next), (
                "a prompt ended before it was computed"
            )
            self._connector.finished(saving.job, None)
        return True

    def _load(self, fetch: Fetch) -> None:
        seq, kv = fetch.seq, self._scheduler.kv
        number = next(self._numbers)
        self._fetches[number] = fetch
        self._number_of[seq] = number
        ask = Ask(
            number,
            tuple(seq.token_ids(0, fetch.num_tokens)),
            tuple(missing.start for missing in fetch.missing),
            kv.chain_digest(seq, fetch.num_tokens // kv.block_size),
            seq.request.priority,
            seq.request.cache_salt,
        )
        self._connector.load(ask)

    def _reads(self, plan: StepPlan) -> list[BlockRead]:
        size = self._scheduler.kv.block_size
        reads = []
        for row in plan.rows:
            saving = self._saving.get(row.seq)
            if saving is None:
                continue
            stop = min((row.start + row.num_tokens) // size, saving.stop)
            for group, table in enumerate(row.seq.tables):
                start = saving.next[group]
                if start < stop:
                    saving.next[group] = stop
                    blocks = tuple(table[start:stop])
                    assert all(blocks), "a block that is wanted left the window before it was read"
                    reads.append(BlockRead(group, blocks, partial(self._save, saving.job, group, start)))
        return reads

    def _save(
        self,
        job: Job,
        group: int,
        first: int,
        layers: tuple[int, ...],
        start: int,
        contents: tuple[Array, ...],
    ) -> None:
        stop = first + start + len(contents[0])
        self._connector.save(job, Blocks(group, layers, first + start, stop, contents))

    # ---- events

    def on_event(self, event: Event) -> None:
        """Takes an event, on any thread."""
        match event:
            case Asked():
                self._prepare(event)
            case Cancelled():
                self._post(lambda: self._jobs.abort(_request_id(event.job)))
            case Arrived():
                self._post(lambda: self._arrived(event))
            case Ended():
                self._post(lambda: self._ended(event))

    def _post(self, function: Callable[[], None]) -> None:
        def run() -> None:
            try:
                function()
            except Exception as error:  # the loop raises it in its next step
                self._failure = error
            self._has_news = True

        with self._lock:
            if self._call is None:
                self._early.append(run)
            else:
                self._call(run)

    def _prepare(self, asked: Asked) -> None:
        try:
            self._check(asked.ask)
            sequences = self._jobs.prepare(_request_id(asked.job), asked.ask)
        except RequestError as error:
            message = str(error)
            self._post(lambda: self._connector.finished(asked.job, message))
        else:
            self._post(lambda: self._queue(asked, sequences))

    def _check(self, ask: Ask) -> None:
        kv, tokens = self._scheduler.kv, len(ask.token_ids)
        count, rest = divmod(tokens, kv.block_size)
        if not count or rest:
            raise RequestError(f"{tokens} tokens are no full blocks of {kv.block_size}")
        # Blocks before the window may be gone before they can be read.
        least = [kv.first_visible(group, tokens) for group in range(len(kv.windows))]
        if len(ask.first) != len(least) or any(not low <= at <= count for low, at in zip(least, ask.first)):
            raise RequestError(f"first blocks are {ask.first}; allowed is {least} to {count}")

    def _queue(self, asked: Asked, sequences: list[Sequence]) -> None:
        (seq,) = sequences
        kv = self._scheduler.kv
        count = len(asked.ask.token_ids) // kv.block_size
        if kv.chain_digest(seq, count) != asked.ask.digest:
            self._connector.finished(asked.job, "the digest of the blocks is not that of their tokens")
            return
        self._saving[seq] = _Saving(asked.job, count, list(asked.ask.first))
        try:
            self._jobs.add(sequences)
        except (QueueFullError, RequestError) as error:
            del self._saving[seq]
            self._connector.finished(asked.job, str(error))

    def _arrived(self, event: Arrived) -> None:
        fetch = self._fetches.get(event.fetch)
        if (
            fetch is not None and fetch.seq.status is Status.FETCHING
        ):  # not one that was aborted since the last step
            blocks = event.blocks
            ids = fetch.seq.tables[blocks.group][blocks.start : blocks.stop]
            self._writer.write_blocks(blocks.group, blocks.layers, ids, blocks.contents)

    def _ended(self, event: Ended) -> None:
        fetch = self._fetches.get(event.fetch)
        if fetch is not None and fetch.seq.status is Status.FETCHING:
            del self._fetches[event.fetch]
            del self._number_of[fetch.seq]
            self._scheduler.fetched(fetch.seq, 0 if event.error is not None else fetch.num_tokens)

    def check_integrity(self) -> None:
        """Asserts that fetches and jobs are those of live sequences."""
        fetching = set(self._scheduler.fetches.fetching)
        waiting_for = {fetch.seq for fetch in self._fetches.values()} | {
            fetch.seq for fetch in self._scheduler.fetches.started
        }
        assert fetching <= waiting_for, "a sequence waits for blocks that nobody was asked for"
        assert set(self._number_of) == {fetch.seq for fetch in self._fetches.values()}
        assert set(self._saving) <= set(self._scheduler.live_sequences()), "a job outlived its sequence"


def _request_id(job: Job) -> str:
    return f"kv {job.peer.hex()} {job.fetch}"
