"""The decode engine's end: asks prefill engines for blocks, and gives up on those that do not answer."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import msgspec
import zmq

from jaxinfer.config_values import ConfigError
from jaxinfer.kv_transfer.connector import Arrived, Blocks, Ended, Event, check_blocks
from jaxinfer.kv_transfer.io_thread import IOThread
from jaxinfer.kv_transfer.job_server import MISSED_BEATS
from jaxinfer.kv_transfer.layout import MAX_PIECE_BLOCKS, EngineCard, dtype_of, mismatch
from jaxinfer.kv_transfer.messages import (
    Ask,
    Cancel,
    End,
    Got,
    Hello,
    Piece,
    Welcome,
    decode_from_prefill,
    encode,
)
from jaxinfer.kv_transfer.payload import Payload
from jaxinfer.kv_transfer.transport import Frame, Receiver, TransferError, num_bytes
from jaxinfer.observability.snapshot import TransferStats

logger = logging.getLogger(__name__)

_SMALL_MESSAGE = 1 << 20
"""Bytes of anything but the content of blocks."""


@dataclass
class _Peer:
    """A prefill engine.

    Attributes:
        instance, data: as its ``Welcome`` said; empty before it, and when it is lost.
        misfit: why it cannot be used.
        draining: it takes no fetch any more, but ends those that it has.
        work: pieces and ends, for the thread that takes them.
    """

    address: str
    socket: "zmq.Socket[bytes]"
    receiver: Receiver
    heard: float = 0.0
    instance: bytes = b""
    data: bytes = b""
    misfit: str | None = None
    draining: bool = False
    fetches: int = 0
    work: "SimpleQueue[tuple[Piece | End, bytes, list[Frame]] | None]" = field(default_factory=SimpleQueue)

    @property
    def usable(self) -> bool:
        return bool(self.instance) and self.misfit is None and not self.draining


@dataclass
class _Fetch:
    """Attributes:
    next: first block that has not come, by layer.
    """

    ask: Ask
    peer: _Peer
    started: float
    deadline: float
    stop: int
    next: dict[int, int]


class FetchClient:
    """Connects to prefill engines.

    Args:
        receiver: makes the transport's end for a peer.
        timeout: seconds that a fetch may take.
        connect_timeout: seconds that ``start`` waits for answers of the peers.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        card: EngineCard,
        payload: Payload,
        receiver: Callable[[], Receiver],
        stats: TransferStats,
        *,
        heartbeat: float,
        timeout: float,
        connect_timeout: float,
    ) -> None:
        self._card = card
        self._payload = payload
        self._stats = stats
        self._heartbeat = heartbeat
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._on_event: Callable[[Event], None] = lambda event: None
        self._fetches: dict[int, _Fetch] = {}
        self._beat = 0.0
        self._answers = threading.Condition()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        identity = os.urandom(8)
        self._peers = [self._connect(address, identity, receiver()) for address in addresses]
        self._io = IOThread("jaxinfer-kv-client", self._tick, min(heartbeat, timeout, 0.5) / 2, self._broken)
        self._workers = [
            threading.Thread(target=self._work, args=(peer,), name="jaxinfer-kv-receive", daemon=True)
            for peer in self._peers
        ]

    @property
    def available(self) -> bool:
        return any(peer.usable for peer in self._peers)

    def start(self, on_event: Callable[[Event], None]) -> None:
        """Connects, and waits a while for the peers' answers.

        Raises:
            ConfigError: a peer does not fit; names both engines.
        """
        self._on_event = on_event
        for peer in self._peers:
            self._io.handle(peer.socket, lambda frames, peer=peer: self._receive(peer, frames))  # type: ignore[misc]
        self._io.start()
        for worker in self._workers:
            worker.start()
        with self._answers:
            self._answers.wait_for(lambda: all(peer.instance for peer in self._peers), self._connect_timeout)
        for peer in self._peers:
            if peer.misfit is not None:
                raise ConfigError(f"disaggregation.peers: {peer.address} cannot be used: {peer.misfit}")
            if not peer.instance:
                logger.warning("no prefill engine answers at %s yet", peer.address)

    def load(self, ask: Ask) -> None:
        """See ``KVConnector``."""
        self._io.post(lambda: self._load(ask))

    def cancel(self, fetch: int) -> None:
        """See ``KVConnector``."""
        self._io.post(lambda: self._cancel(fetch))

    def close(self) -> None:
        def last() -> None:
            for fetch in list(self._fetches):
                self._cancel(fetch)

        for peer in self._peers:
            peer.work.put(None)
        self._io.stop(last)
        if not self._io.started:
            for peer in self._peers:
                peer.socket.close(0)
        for peer, worker in zip(self._peers, self._workers):
            if worker.ident is not None:
                worker.join(1.0)  # one that waits for a device or a network is left behind
            peer.receiver.close()
        self._context.term()

    def _connect(self, address: str, identity: bytes, receiver: Receiver) -> _Peer:
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.IDENTITY, identity)
        socket.set(zmq.IMMEDIATE, 1)  # nothing is kept for an engine that is not there
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        layers = range(len(self._card.layout.heads))
        frames = [num_bytes(shape) for shape in self._payload.shapes(layers, MAX_PIECE_BLOCKS)]
        socket.set(zmq.MAXMSGSIZE, max(_SMALL_MESSAGE, *frames))
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"disaggregation.peers: {address} is not an address to connect to: {error.strerror}"
            ) from error
        return _Peer(address, socket, receiver)

    # ---- I/O thread

    def _send(self, peer: _Peer, message: Hello | Ask | Cancel | Got) -> bool:
        try:
            peer.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _load(self, ask: Ask) -> None:
        self._stats.fetches += 1
        usable = [peer for peer in self._peers if peer.usable]
        peer = min(usable, key=lambda peer: peer.fetches, default=None)
        now = time.monotonic()
        if peer is None or not self._send(peer, ask):
            self._stats.fetches_failed += 1
            self._on_event(Ended(ask.fetch, "no prefill engine answers"))
            return
        peer.fetches += 1
        layout = self._card.layout
        first = {layer: ask.first[group] for layer, group in enumerate(layout.groups)}
        stop = -(-len(ask.token_ids) // layout.block_size)
        self._fetches[ask.fetch] = _Fetch(ask, peer, now, now + self._timeout, stop, first)

    def _cancel(self, fetch: int) -> None:
        state = self._fetches.get(fetch)
        if state is not None:
            self._leave(state)
            self._send(state.peer, Cancel(fetch))

    def _leave(self, state: _Fetch) -> None:
        del self._fetches[state.ask.fetch]
        state.peer.fetches -= 1
        self._stats.fetch_seconds += time.monotonic() - state.started

    def _fail(self, fetch: int, why: str) -> None:
        """Ends a fetch whose blocks do not come."""
        state = self._fetches.get(fetch)
        if state is not None:
            logger.warning("a prompt is computed here after all: %s: %s", state.peer.address, why)
            self._stats.fetches_failed += 1
            self._leave(state)
            self._send(state.peer, Cancel(fetch))
            self._on_event(Ended(fetch, why))

    def _receive(self, peer: _Peer, frames: list[zmq.Frame]) -> None:
        try:
            message = decode_from_prefill(frames[0].buffer)
        except msgspec.MsgspecError as error:
            self._lose(peer, f"it sent what cannot be read: {error}")
            return
        peer.heard = time.monotonic()
        if isinstance(message, Welcome):
            self._welcome(peer, message)
        elif isinstance(message, Piece):
            peer.work.put((message, peer.data, list(frames[1:])))
        else:
            peer.work.put((message, peer.data, []))

    def _welcome(self, peer: _Peer, message: Welcome) -> None:
        if peer.instance and peer.instance != message.instance:
            self._lose(peer, "it was started anew")
        misfit = mismatch(self._card, message.card)
        if misfit is not None and misfit != peer.misfit:
            logger.error("the prefill engine at %s cannot be used: %s", peer.address, misfit)
        if message.draining and not peer.draining:
            logger.info("the prefill engine at %s is about to stop, and is not asked any more", peer.address)
        peer.draining = message.draining
        with self._answers:
            peer.misfit, peer.data, peer.instance = misfit, message.data, message.instance
            self._answers.notify_all()

    def _lose(self, peer: _Peer, why: str) -> None:
        peer.instance = b""
        for fetch in [number for number, state in self._fetches.items() if state.peer is peer]:
            self._fail(fetch, why)

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._beat >= self._heartbeat:
            self._beat = now
            hello = Hello(self._card, self._heartbeat, self._timeout)
            for peer in self._peers:
                self._send(peer, hello)
        for peer in self._peers:
            if peer.instance and now - peer.heard > MISSED_BEATS * self._heartbeat:
                self._lose(peer, f"it is silent for {now - peer.heard:.1f} s")
        for fetch in [number for number, state in self._fetches.items() if now > state.deadline]:
            self._fail(fetch, f"the blocks did not come within {self._timeout:g} s")

    def _broken(self, error: Exception) -> None:
        for fetch in list(self._fetches):
            self._fail(fetch, f"{type(error).__name__}: {error}")

    # ---- worker of a peer: waits for content

    def _work(self, peer: _Peer) -> None:
        while (item := peer.work.get()) is not None:
            message, data, frames = item
            if isinstance(message, End):
                self._io.post(lambda message=message: self._end(message))  # type: ignore[misc]
                continue
            try:
                self._take(peer, message, data, frames)
            except Exception as error:  # this fetch's trouble only
                if not isinstance(error, TransferError | ValueError):
                    logger.exception("blocks could not be taken")
                why = str(error)
                self._io.post(lambda message=message, why=why: self._fail(message.fetch, why))  # type: ignore[misc]
            self._io.post(lambda message=message: self._got(peer, message))  # type: ignore[misc]

    def _take(self, peer: _Peer, piece: Piece, data: bytes, frames: list[Frame]) -> None:
        state = self._fetches.get(piece.fetch)
        if state is None:
            return  # nobody waits for it any more
        self._check(state, piece)
        shapes = self._payload.shapes(piece.layers, piece.stop - piece.start)
        contents = self._payload.unpack(peer.receiver.unpack(data, frames, shapes))
        blocks = Blocks(piece.group, piece.layers, piece.start, piece.stop, contents)
        layout, count = self._card.layout, piece.stop - piece.start
        whole = [dims for layer in piece.layers for dims in layout.shapes(layer, count)]
        check_blocks(blocks, whole, dtype_of(layout.dtype))
        for layer in piece.layers:
            state.next[layer] = piece.stop
        self._stats.received_bytes += self._payload.num_bytes(piece.layers, count)
        if piece.layers[0] == layout.layers_of(piece.group)[0]:
            self._stats.received_blocks += count
        self._on_event(Arrived(piece.fetch, blocks))

    def _check(self, state: _Fetch, piece: Piece) -> None:
        """Raises:
        ValueError: the piece is not one that this fetch waits for.
        """
        layout = self._card.layout
        if piece.digest != state.ask.digest:
            raise ValueError("a piece belongs to other blocks than those asked for")
        if not 0 <= piece.group < len(layout.windows) or not piece.layers:
            raise ValueError(f"a piece has layers {piece.layers} of group {piece.group}")
        wrong = [
            layer for layer in piece.layers if layer not in state.next or layout.groups[layer] != piece.group
        ]
        expected = [state.next[layer] for layer in piece.layers if layer not in wrong]
        if (
            wrong
            or any(start != piece.start for start in expected)
            or not piece.start < piece.stop <= state.stop
        ):
            raise ValueError(
                f"a piece has blocks {piece.start} to {piece.stop} of layers {piece.layers} in group {piece.group}, "
                f"but those from {expected} to {state.stop} are missing"
            )

    def _got(self, peer: _Peer, piece: Piece) -> None:
        self._send(peer, Got(piece.fetch, piece.piece))

    def _end(self, message: End) -> None:
        state = self._fetches.get(message.fetch)
        if state is None:
            return
        if message.error is not None:
            self._fail(message.fetch, message.error)
        elif any(start != state.stop for start in state.next.values()):
            self._fail(message.fetch, "it ended before all blocks had come")
        else:
            self._leave(state)
            self._on_event(Ended(message.fetch))
