"""Prefill and decode in different engines, as the step loop sees it: blocks that come, and blocks that go."""

import itertools
import threading
import time
from collections import deque
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


_WRITE_SHARE = 0.1
"""Share of the time between two steps in which blocks are written beside running sequences."""
_SPREAD = 8
"""Part of the waiting pieces that is written in any case, so that they never pile up."""


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
    num_tokens: int
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
        self._arrivals: deque[Arrived | Ended] = deque()
        self._clock = time.monotonic
        self._received = 0.0
        self._has_news = False
        self._failure: Exception | None = None

    @property
    def stats(self) -> TransferStats:
        return self._connector.stats

    @property
    def has_news(self) -> bool:
        """Whether a step is worth while, even if the one before had nothing to compute."""
        return self._has_news or bool(self._arrivals) or self._scheduler.fetches.has_news

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

    def receive(self) -> None:
        """Writes blocks that have come, and takes note of fetches that have ended; before a step is planned.

        The tokens of running sequences are late by what this takes, so while there are some, pieces that came at once
        are spread over several steps.
        """
        started = self._clock()
        end = started + _WRITE_SHARE * (started - self._received)
        self._received = started
        written, least = 0, -(-len(self._arrivals) // _SPREAD)
        while self._arrivals:
            event = self._arrivals.popleft()
            if isinstance(event, Ended):
                self._ended(event)
            elif self._arrived(event):
                written += 1
                if self._scheduler.running and written >= least and self._clock() >= end:
                    return

    def scheduled(self, plan: StepPlan | None) -> StepPlan | None:
        """Starts and cancels what the scheduler decided, and has blocks that the step completes read for who asked."""
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
            end = row.start + row.num_tokens
            stop = min(end // size if end < saving.num_tokens else saving.stop, saving.stop)
            for group, table in enumerate(row.seq.tables):
                start = saving.next[group]
                if start < stop:
                    saving.next[group] = stop
                    blocks = tuple(table[start:stop])
                    assert all(blocks), "a block that is wanted left the window before it was read"
                    reads.append(BlockRead(group, blocks, partial(self._save, saving, group, start)))
        return reads

    def _save(
        self,
        saving: _Saving,
        group: int,
        first: int,
        layers: tuple[int, ...],
        start: int,
        contents: tuple[Array, ...],
    ) -> None:
        stop = first + start + len(contents[0])
        unused = max(0, stop * self._scheduler.kv.block_size - saving.num_tokens)
        self._connector.save(saving.job, Blocks(group, layers, first + start, stop, contents, unused))

    # ---- events

    def on_event(self, event: Event) -> None:
        """Takes an event, on any thread."""
        match event:
            case Asked():
                self._prepare(event)
            case Cancelled():
                self._post(lambda: self._jobs.abort(_request_id(event.job)))
            case Arrived() | Ended():
                self._post(lambda: self._arrivals.append(event))

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
        count = kv.blocks_for(tokens)
        if not count:
            raise RequestError("no tokens")
        # Blocks before the window may be gone before they can be read.
        least = [kv.first_visible(group, tokens) for group in range(len(kv.windows))]
        if len(ask.first) != len(least) or any(not low <= at <= count for low, at in zip(least, ask.first)):
            raise RequestError(f"first blocks are {ask.first}; allowed is {least} to {count}")

    def _queue(self, asked: Asked, sequences: list[Sequence]) -> None:
        (seq,) = sequences
        kv, tokens = self._scheduler.kv, len(asked.ask.token_ids)
        if kv.chain_digest(seq, tokens // kv.block_size) != asked.ask.digest:
            self._connector.finished(asked.job, "the digest of the blocks is not that of their tokens")
            return
        self._saving[seq] = _Saving(asked.job, tokens, kv.blocks_for(tokens), list(asked.ask.first))
        try:
            self._jobs.add(sequences)
        except (QueueFullError, RequestError) as error:
            del self._saving[seq]
            self._connector.finished(asked.job, str(error))

    def _arrived(self, event: Arrived) -> bool:
        """Writes a piece; False if nobody waits for it any more."""
        fetch = self._fetches.get(event.fetch)
        if fetch is None or fetch.seq.status is not Status.FETCHING:  # aborted since the last step
            return False
        blocks = event.blocks
        ids = fetch.seq.tables[blocks.group][blocks.start : blocks.stop]
        self._writer.write_blocks(blocks.group, blocks.layers, ids, blocks.contents)
        return True

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
