"""A prefill engine's end and decode engines that go away, come back, or do not say what they took."""

import threading
import time
from collections.abc import Hashable, Iterator, Sequence

import pytest
import zmq

from jaxinfer.kv_transfer.connector import Array, Asked, Blocks, Cancelled, Job
from jaxinfer.kv_transfer.job_server import JobServer
from jaxinfer.kv_transfer.layout import EngineCard
from jaxinfer.kv_transfer.messages import (
    Cancel,
    End,
    FromDecode,
    FromPrefill,
    Got,
    Hello,
    Piece,
    Welcome,
    decode_from_prefill,
    encode,
)
from jaxinfer.kv_transfer.transport import Frame
from tests.support.connectors import LAYOUT, Engine, ask, content, until

pytestmark = pytest.mark.feature("disaggregation")

CARD = EngineCard("model", "f", LAYOUT, "host", "none")


class Decoder:
    """A decode engine that says what the test wants."""

    def __init__(self, address: str, identity: bytes = b"decoder") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, identity)
        self._socket.set(zmq.RCVTIMEO, 20000)
        self._socket.connect(address)

    def say(self, message: FromDecode) -> None:
        self._socket.send(encode(message))

    def hello(self, heartbeat: float = 1000.0, timeout: float = 1000.0) -> None:
        self.say(Hello(CARD, heartbeat, timeout))
        assert isinstance(self.next(), Welcome)

    def next(self) -> FromPrefill:
        return decode_from_prefill(self._socket.recv_multipart()[0])

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


class SlowSender:
    """Content is computed when the test says so."""

    address = b""

    def __init__(self) -> None:
        self.begun, self.computed = threading.Event(), threading.Event()
        self.held: set[Hashable] = set()

    def pack(self, key: Hashable, arrays: Sequence[Array]) -> list[Frame]:
        self.begun.set()
        assert self.computed.wait(20)
        self.held.add(key)
        return []

    def free(self, key: Hashable) -> None:
        self.held.discard(key)

    def close(self) -> None: ...


@pytest.fixture
def there() -> Iterator[Engine]:
    engine = Engine("prefill", heartbeat=0.05)
    engine.start()
    yield engine
    engine.connector.close()


def server(there: Engine) -> JobServer:
    assert there.connector.server is not None
    return there.connector.server


@pytest.fixture
def decoder(there: Engine) -> Iterator[Decoder]:
    end = Decoder(server(there).address)
    yield end
    end.close()


def job_of(there: Engine, decoder: Decoder, fetch: int = 1) -> Job:
    decoder.say(ask(fetch))
    asked = there.next()
    assert isinstance(asked, Asked)
    return asked.job


def save(there: Engine, job: Job) -> None:
    there.connector.save(job, Blocks(0, (0,), 0, 2, content((0,), 2)))


def test_a_decode_engine_that_is_silent_is_lost_and_told(there, decoder) -> None:
    decoder.hello(heartbeat=0.2)
    job = job_of(there, decoder)
    save(there, job)
    assert there.next() == Cancelled(job)
    assert server(there).num_jobs == 0
    while isinstance(message := decoder.next(), Piece):
        pass
    assert message == End(1, "the prefill engine heard nothing of this one")


def test_a_decode_engine_is_as_silent_as_it_said(there, decoder) -> None:
    decoder.hello(heartbeat=1000.0)
    job_of(there, decoder)
    time.sleep(0.5)  # more than two looks at the clock, and three heartbeats of the prefill engine
    assert server(there).num_jobs == 1


def test_pieces_that_nobody_says_to_have_taken_are_let_go(there, decoder) -> None:
    server(there)._sender = sender = SlowSender()
    sender.computed.set()
    decoder.hello(timeout=0.1)
    job = job_of(there, decoder)
    save(there, job)
    assert isinstance(decoder.next(), Piece)
    assert sender.held
    there.connector.finished(job, None)
    assert decoder.next() == End(1)
    until(lambda: server(there).num_jobs == 0)
    assert not sender.held


def test_an_engine_that_comes_back_after_a_break_is_answered(there, decoder) -> None:
    """The old connection is still open for the prefill engine: nobody told it that the network broke."""
    decoder.hello()
    back = Decoder(server(there).address)
    back.hello()
    job = job_of(there, back)
    there.connector.finished(job, "no room")
    assert back.next() == End(1, "no room")
    back.close()


def test_a_piece_of_a_job_that_was_cancelled_while_it_was_computed_holds_nothing(there, decoder) -> None:
    server(there)._sender = sender = SlowSender()
    decoder.hello()
    job = job_of(there, decoder)
    save(there, job)
    assert sender.begun.wait(20)
    decoder.say(Cancel(1))
    assert there.next() == Cancelled(job)
    sender.computed.set()
    after = job_of(there, decoder, 2)
    there.connector.finished(after, "behind the piece")
    assert decoder.next() == End(2, "behind the piece")
    assert not sender.held


def test_a_job_that_waits_for_its_end_is_not_forgotten(there, decoder) -> None:
    """It exceeds the buffer, and the thread that sends is busy with another one."""
    server(there)._sender = sender = SlowSender()
    server(there)._max_buffered = 600
    decoder.hello()
    save(there, job_of(there, decoder, 1))
    assert sender.begun.wait(20)
    save(there, job_of(there, decoder, 2))
    time.sleep(0.5)
    assert server(there).num_jobs == 2
    sender.computed.set()
    assert isinstance(decoder.next(), Piece)
    end = decoder.next()
    assert isinstance(end, End)
    assert (end.fetch, end.error) == (2, "more than 600 bytes wait to be taken")


def test_an_engine_that_drains_ends_its_jobs_and_takes_no_others(there, decoder) -> None:
    decoder.hello()
    job = job_of(there, decoder)
    drained = there.connector.drain()
    welcome = decoder.next()
    assert isinstance(welcome, Welcome)
    assert welcome.draining
    decoder.say(ask(2))  # on its way when the other side heard of it
    assert decoder.next() == End(2, "the prefill engine is about to stop, and takes no more prompts")
    save(there, job)
    there.connector.finished(job, None)
    assert isinstance(decoder.next(), Piece)
    assert decoder.next() == End(1)
    assert not drained.done()  # what it holds was not taken
    decoder.say(Got(1, 0))
    drained.result(20)
    assert there.connector.drain().done()
    assert server(there).num_jobs == 0


def test_an_engine_that_drains_waits_for_nobody_who_is_gone(there, decoder) -> None:
    decoder.hello(heartbeat=0.1)
    job = job_of(there, decoder)
    there.connector.drain().result(20)
    assert there.next() == Cancelled(job)


def test_a_drain_ends_with_the_engine(there, decoder) -> None:
    decoder.hello()
    job_of(there, decoder)
    drained = there.connector.drain()
    there.connector.close()
    drained.result(20)
