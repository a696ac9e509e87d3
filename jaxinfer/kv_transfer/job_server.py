"""The prefill engine's end: takes asks, and sends blocks as they are computed."""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

import msgspec
import zmq

from jaxinfer.config_values import ConfigError
from jaxinfer.kv_transfer.connector import Asked, Blocks, Cancelled, Event, Job
from jaxinfer.kv_transfer.io_thread import IOThread
from jaxinfer.kv_transfer.layout import EngineCard, mismatch
from jaxinfer.kv_transfer.messages import (
    Ask,
    Cancel,
    End,
    Got,
    Hello,
    Piece,
    Welcome,
    decode_from_decode,
    encode,
)
from jaxinfer.kv_transfer.payload import Payload
from jaxinfer.kv_transfer.transport import Frame, Sender, TransferError
from jaxinfer.observability.snapshot import TransferStats

logger = logging.getLogger(__name__)

MISSED_BEATS = 3
"""Heartbeats without a sign of life after which an engine counts as lost."""
MAX_MESSAGE = 64 << 20
_TICK = 0.2
_KEEP = 2.0
"""Times the peer's timeout after which nobody reads the pieces of a job that ended, whether it said so or not."""


@dataclass
class _Job:
    """Attributes:
    digest: of the chain that was asked for.
    pieces: given out so far; ``held`` has the bytes of those that were not taken yet.
    open: more may be sent.
    expires: when the pieces of a job that ended well are let go; None before its end.
    """

    digest: bytes
    pieces: int = 0
    held: dict[int, int] = field(default_factory=dict)
    open: bool = True
    expires: float | None = None


@dataclass
class _Peer:
    hello: Hello
    heard: float
    misfit: str | None


@dataclass(frozen=True)
class _Save:
    job: Job
    piece: int
    blocks: Blocks


@dataclass(frozen=True)
class _Finish:
    job: Job
    error: str | None


class JobServer:
    """Listens for decode engines.

    Args:
        max_buffered: bytes of a peer that wait to be taken; a job that exceeds this fails.
    """

    def __init__(
        self,
        address: str,
        card: EngineCard,
        payload: Payload,
        sender: Sender,
        stats: TransferStats,
        *,
        max_buffered: int,
    ) -> None:
        self._address = address
        self._card = card
        self._payload = payload
        self._sender = sender
        self._stats = stats
        self._max_buffered = max_buffered
        self._instance = os.urandom(8)
        self._on_event: Callable[[Event], None] = lambda event: None
        self._lock = threading.Lock()
        """Guards jobs and what they hold."""
        self._jobs: dict[Job, _Job] = {}
        self._peers: dict[bytes, _Peer] = {}
        self._draining = False
        self._drained: Future[None] = Future()
        self._drained.set_running_or_notify_cancel()  # several may wait for it, so nobody can cancel it
        self._work: SimpleQueue[_Save | _Finish | None] = SimpleQueue()
        self._worker = threading.Thread(target=self._run_worker, name="jaxinfer-kv-send", daemon=True)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)  # who comes back after a break is not taken for an impostor
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self._io = IOThread("jaxinfer-kv-server", self._tick, _TICK, lambda error: None)

    @property
    def address(self) -> str:
        """Where it listens; with the port that was taken if any free one was asked for."""
        return str(self._socket.get_string(zmq.LAST_ENDPOINT))

    @property
    def num_jobs(self) -> int:
        with self._lock:
            return len(self._jobs)

    def start(self, on_event: Callable[[Event], None]) -> None:
        """Raises:
        ConfigError: the address cannot be used.
        """
        self._on_event = on_event
        try:
            self._socket.bind(self._address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"disaggregation.bind: cannot listen on {self._address}: {error.strerror}"
            ) from error
        self._io.handle(self._socket, self._receive)
        self._io.start()
        self._worker.start()
        logger.info("computes prompts for other engines at %s", self.address)

    def save(self, job: Job, blocks: Blocks) -> None:
        """See ``KVConnector``."""
        with self._lock:
            state = self._jobs.get(job)
            if state is None or not state.open:
                return
            held = sum(sum(s.held.values()) for j, s in self._jobs.items() if j.peer == job.peer)
            size = self._payload.num_bytes(blocks.layers, blocks.stop - blocks.start)
            if held + size > self._max_buffered:
                state.open = False
                piece = -1
            else:
                piece = state.pieces
                state.pieces += 1
                state.held[piece] = size
        if piece < 0:
            self._work.put(_Finish(job, f"more than {self._max_buffered} bytes wait to be taken"))
        else:
            self._work.put(_Save(job, piece, blocks))

    def finished(self, job: Job, error: str | None) -> None:
        """See ``KVConnector``."""
        self._work.put(_Finish(job, error))

    def drain(self) -> Future[None]:
        """See ``KVConnector``."""
        self._io.post(self._drain)
        return self._drained

    def close(self) -> None:
        def last() -> None:
            for job in list(self._jobs):
                self._send(job.peer, End(job.fetch, "the prefill engine stops"))

        self._work.put(None)
        if self._worker.ident is not None:
            self._worker.join(5.0)
        self._io.stop(last)
        if not self._io.started:
            self._socket.close(0)
        with self._lock:
            if not self._drained.done():
                self._drained.set_result(None)
        self._sender.close()
        self._context.term()

    # ---- worker: waits for the device

    def _run_worker(self) -> None:
        while (item := self._work.get()) is not None:
            if isinstance(item, _Finish):
                self._io.post(lambda item=item: self._finish(item.job, item.error))  # type: ignore[misc]
                continue
            try:
                self._pack(item)
            except Exception as error:  # this job's trouble only
                if not isinstance(error, TransferError):
                    logger.exception("blocks could not be sent")
                message = f"the blocks could not be sent: {error}"
                with self._lock:
                    self._let_go(item.job, item.piece)
                self._io.post(lambda job=item.job, message=message: self._finish(job, message))  # type: ignore[misc]

    def _pack(self, item: _Save) -> None:
        with self._lock:
            state = self._jobs.get(item.job)
            if state is None or not state.open:
                self._let_go(item.job, item.piece)
                return
        blocks = item.blocks
        frames = self._sender.pack((item.job, item.piece), self._payload.pack(blocks.contents, blocks.unused))
        with self._lock:
            if item.job not in self._jobs:  # cancelled meanwhile, when there was nothing to free yet
                self._sender.free((item.job, item.piece))
                return
        count = blocks.stop - blocks.start
        piece = Piece(
            item.job.fetch, item.piece, blocks.group, blocks.layers, blocks.start, blocks.stop, state.digest
        )
        self._stats.sent_bytes += self._payload.num_bytes(blocks.layers, count)
        if blocks.layers[0] == self._card.layout.layers_of(blocks.group)[0]:
            self._stats.sent_blocks += count
        self._io.post(lambda: self._send(item.job.peer, piece, frames))

    def _let_go(self, job: Job, piece: int) -> None:
        """Frees what a piece holds; with the lock."""
        state = self._jobs.get(job)
        if state is not None:
            state.held.pop(piece, None)
        self._sender.free((job, piece))

    # ---- I/O thread

    def _send(self, peer: bytes, message: Welcome | Piece | End, frames: list[Frame] | None = None) -> None:
        # To an engine that is gone nothing is sent.
        self._socket.send_multipart([peer, encode(message), *(frames or [])], copy=False)

    def _receive(self, frames: list[zmq.Frame]) -> None:
        peer = frames[0].bytes
        try:
            message = decode_from_decode(frames[1].buffer)
        except (msgspec.MsgspecError, IndexError) as error:
            logger.warning("a message of another engine cannot be read: %s", error)
            return
        if isinstance(message, Hello):
            self._hello(peer, message)
            return
        known = self._peers.get(peer)
        if known is None:
            if isinstance(message, Ask):
                self._send(peer, End(message.fetch, "a prefill engine answers whoever said hello first"))
            return
        known.heard = time.monotonic()
        match message:
            case Ask():
                self._ask(peer, message, known)
            case Cancel():
                self._cancel(Job(peer, message.fetch))
            case Got():
                with self._lock:
                    self._let_go(Job(peer, message.fetch), message.piece)

    def _hello(self, peer: bytes, message: Hello) -> None:
        misfit = mismatch(self._card, message.card)
        if peer not in self._peers and misfit is not None:
            logger.error("a decode engine does not fit: %s", misfit)
        self._peers[peer] = _Peer(message, time.monotonic(), misfit)
        self._welcome(peer)

    def _welcome(self, peer: bytes) -> None:
        self._send(peer, Welcome(self._instance, self._card, self._sender.address, self._draining))

    def _drain(self) -> None:
        if not self._draining:
            self._draining = True
            logger.info("takes no more prompts of other engines; %d are left", self.num_jobs)
            for peer in self._peers:
                self._welcome(peer)
            self._note_drained()

    def _note_drained(self) -> None:
        with self._lock:
            if self._draining and not self._jobs and not self._drained.done():
                self._drained.set_result(None)

    def _ask(self, peer: bytes, ask: Ask, known: _Peer) -> None:
        job = Job(peer, ask.fetch)
        if known.misfit is not None:
            self._send(peer, End(ask.fetch, known.misfit))
        elif self._draining:
            self._send(peer, End(ask.fetch, "the prefill engine is about to stop, and takes no more prompts"))
        elif job in self._jobs:
            self._send(peer, End(ask.fetch, "this number of a fetch is in use"))
        else:
            with self._lock:
                self._jobs[job] = _Job(ask.digest)
            self._stats.jobs += 1
            self._on_event(Asked(job, ask))

    def _cancel(self, job: Job) -> None:
        if job in self._jobs:
            self._stats.jobs_failed += 1
            self._forget(job)
            self._on_event(Cancelled(job))

    def _finish(self, job: Job, error: str | None) -> None:
        if job not in self._jobs:
            return
        if error is not None:
            self._stats.jobs_failed += 1
        self._send(job.peer, End(job.fetch, error))
        with self._lock:
            state = self._jobs[job]
            state.open = False
            state.expires = time.monotonic() + _KEEP * self._peers[job.peer].hello.timeout
        if error is not None:
            self._forget(job)
            self._on_event(Cancelled(job))
        elif not state.held:
            self._forget(job)

    def _forget(self, job: Job) -> None:
        with self._lock:
            state = self._jobs.pop(job)
            for piece in state.held:
                self._sender.free((job, piece))
        self._note_drained()

    def _tick(self) -> None:
        now = time.monotonic()
        for peer, known in list(self._peers.items()):
            if now - known.heard > MISSED_BEATS * known.hello.heartbeat:
                logger.warning("a decode engine is silent, and counts as lost")
                del self._peers[peer]
                for job in [job for job in self._jobs if job.peer == peer]:
                    self._send(peer, End(job.fetch, "the prefill engine heard nothing of this one"))
                    self._cancel(job)
        for job, state in list(self._jobs.items()):
            if state.expires is not None and (not state.held or now > state.expires):
                self._forget(job)
