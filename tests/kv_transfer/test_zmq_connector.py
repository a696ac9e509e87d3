"""Both ends of a connection in one process: what is said, what is checked, and what happens when somebody is silent."""

import msgspec
import numpy as np
import pytest
import zmq

from jaxinfer.config_values import ConfigError
from jaxinfer.kv_transfer.connector import Arrived, Asked, Blocks, Cancelled, Ended
from jaxinfer.kv_transfer.messages import Ask, End, Piece, Welcome, decode_from_decode, encode
from jaxinfer.kv_transfer.payload import Payload
from jaxinfer.kv_transfer.quantization import dequantize, quantize
from jaxinfer.kv_transfer.transport import TransferError
from jaxinfer.kv_transfer.transports.nixl import Room
from tests.support.connectors import DIGEST, LAYOUT, Engine, ask, connected, content, until

pytestmark = pytest.mark.feature("disaggregation")

PIECES = [(0, (0,), 0, 2), (1, (1,), 1, 3), (0, (2,), 0, 2), (0, (0, 2), 2, 3)]


def send_all(there: Engine, job) -> dict:
    sent = {}
    for group, layers, start, stop in PIECES:
        sent[group, layers, start, stop] = content(layers, stop - start)
        there.connector.save(job, Blocks(group, layers, start, stop, sent[group, layers, start, stop]))
    there.connector.finished(job, None)
    return sent


def test_blocks_come_as_they_were_sent() -> None:
    with connected() as (here, there):
        assert here.connector.available
        here.connector.load(ask())
        asked = there.next()
        assert isinstance(asked, Asked)
        assert asked.ask == ask()
        sent = send_all(there, asked.job)
        for _ in PIECES:
            event = here.next()
            assert isinstance(event, Arrived)
            b = event.blocks
            for x, y in zip(b.contents, sent[b.group, b.layers, b.start, b.stop], strict=True):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)
        assert here.next() == Ended(1)
        # 3 blocks of group 0 with layers 0 and 2, 2 of group 1 with layer 1.
        size = 4 * 4 * (3 * (2 * 8 + 10) + 2 * 2 * 8)
        assert here.connector.stats.received_bytes == there.connector.stats.sent_bytes == size
        assert here.connector.stats.received_blocks == there.connector.stats.sent_blocks == 5
        until(lambda: there.connector.server.num_jobs == 0)


def test_int8_takes_a_quarter_and_rounds() -> None:
    options = {"quantization": "int8"}
    with connected(options, **options) as (here, there):
        here.connector.load(ask())
        sent = send_all(there, there.next().job)
        for _ in PIECES:
            b = here.next().blocks
            for x, y in zip(b.contents, sent[b.group, b.layers, b.start, b.stop], strict=True):
                limit = np.abs(y).max(axis=(2, 3), keepdims=True) / 127 * 0.501
                assert (np.abs(x - y) <= limit).all()
        assert here.next() == Ended(1)
        assert there.connector.stats.sent_bytes < 4 * 4 * (3 * 26 + 32) / 3


def test_what_is_left_in_unused_slots_spoils_no_scale() -> None:
    x = np.ones((2, 2, 4, 8), np.float32)
    x[1, :, 3] = np.inf
    payload = Payload(msgspec.structs.replace(LAYOUT, heads=(2,), widths=((8, 8),), groups=(0,)), True)
    (back,) = payload.unpack(payload.pack([x], unused=1))
    np.testing.assert_allclose(np.asarray(back)[:, :, :3], 1.0, atol=0.01)
    assert np.isinf(x[1, :, 3]).all()


def test_quantization_keeps_zeros_and_shows_what_is_not_finite() -> None:
    x = np.zeros((2, 1, 4, 4), np.float32)
    x[1, 0, 2, 3] = np.nan
    back = dequantize(*quantize(x), np.dtype(np.float32))
    assert (back[0] == 0).all()
    assert not np.isfinite(back[1]).all()


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ({"print_": "g"}, "fingerprint is f here and g there"),
        ({"layout": msgspec.structs.replace(LAYOUT, block_size=8)}, "block_size is 4 here and 8 there"),
        ({"layout": msgspec.structs.replace(LAYOUT, dtype="bfloat16")}, "dtype is float32 here and bfloat16"),
        ({"quantization": "int8"}, "quantization is none here and int8 there"),
    ],
    ids=["model", "block size", "dtype", "quantization"],
)
def test_engines_that_do_not_fit_are_told_apart(other, names) -> None:
    with (
        pytest.raises(ConfigError, match="this engine has model-decode, the other one model-prefill") as info,
        connected(other),
    ):
        pass
    assert names in str(info.value)


def test_an_address_in_use_is_an_error_that_names_it() -> None:
    with connected() as (_, there):
        address = there.connector.server.address
        with pytest.raises(ConfigError, match=address):
            Engine("prefill", bind=address).start()


def test_a_fetch_without_an_engine_ends_at_once() -> None:
    here = Engine("decode", peers=("tcp://127.0.0.1:9",), connect_timeout=0.1)
    here.start()
    assert not here.connector.available
    here.connector.load(ask())
    assert here.next().error
    here.connector.close()


def test_an_engine_that_is_late_is_not_waited_for() -> None:
    with connected(timeout=0.3) as (here, there):
        here.connector.load(ask())
        job = there.next().job
        assert "within 0.3 s" in here.next().error
        cancelled = there.next()
        assert cancelled == Cancelled(job)
        send_all(there, job)  # too late
        until(lambda: there.connector.server.num_jobs == 0)
        here.connector.load(ask(2))
        job = there.next().job
        send_all(there, job)
        assert [type(here.next()) for _ in range(5)] == [Arrived] * 4 + [Ended]


def test_a_cancelled_fetch_is_cancelled_there() -> None:
    with connected() as (here, there):
        here.connector.load(ask())
        job = there.next().job
        there.connector.save(job, Blocks(0, (0,), 0, 2, content((0,), 2)))
        assert isinstance(here.next(), Arrived)
        here.connector.cancel(1)
        assert there.next() == Cancelled(job)
        until(lambda: there.connector.server.num_jobs == 0)


def test_an_error_there_is_the_reason_here() -> None:
    with connected() as (here, there):
        here.connector.load(ask())
        there.connector.finished(there.next().job, "no room")
        assert here.next().error == "no room"


def test_a_prefill_engine_that_stops_ends_its_fetches() -> None:
    with connected() as (here, there):
        here.connector.load(ask())
        there.next()
        there.connector.close()
        assert here.next().error
        until(lambda: not here.connector.available)
        there.connector.close = lambda: None  # type: ignore[method-assign]


def test_more_than_the_buffer_holds_ends_the_job() -> None:
    with connected({"max_buffered": 10}) as (here, there):
        here.connector.load(ask())
        job = there.next().job
        there.connector.save(job, Blocks(0, (0,), 0, 2, content((0,), 2)))
        assert "more than 10 bytes" in here.next().error
        assert there.next() == Cancelled(job)


class Impostor:
    """A prefill engine that says what the test wants."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self.peer = b""

    def welcome(self, here: Engine, instance: bytes = b"1") -> None:
        self.peer, _ = self.socket.recv_multipart()
        self.say(Welcome(instance, here.connector.client._card, b""))

    def take_ask(self) -> Ask:
        while True:
            message = decode_from_decode(self.socket.recv_multipart()[1])
            if isinstance(message, Ask):
                return message

    def say(self, message, *frames: bytes) -> None:
        self.socket.send_multipart(
            [self.peer, encode(message) if not isinstance(message, bytes) else message, *frames]
        )

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


GOOD = content((0,), 2)
FRAMES = tuple(x.tobytes() for x in GOOD)


@pytest.mark.parametrize(
    ("message", "frames"),
    [
        (Piece(1, 0, 0, (0,), 0, 2, b"e" * 16), FRAMES),
        (Piece(1, 0, 0, (0,), 1, 3, DIGEST), FRAMES),
        (Piece(1, 0, 0, (0,), 0, 4, DIGEST), FRAMES),
        (Piece(1, 0, 1, (0,), 0, 2, DIGEST), FRAMES),
        (Piece(1, 0, 0, (7,), 0, 2, DIGEST), FRAMES),
        (Piece(1, 0, 0, (), 0, 2, DIGEST), ()),
        (Piece(1, 0, 0, (0,), 0, 2, DIGEST), FRAMES[:1]),
        (Piece(1, 0, 0, (0,), 0, 2, DIGEST), (FRAMES[0], FRAMES[1][:-4])),
        (End(1), ()),
        (b"\xc1", ()),
    ],
)
def test_what_was_not_asked_for_ends_the_fetch_and_nothing_else(message, frames) -> None:
    other = Impostor()
    here = Engine("decode", peers=(other.address,), connect_timeout=0.0)
    here.start()
    other.welcome(here)
    until(lambda: here.connector.available)
    here.connector.load(ask())
    other.take_ask()
    other.say(message, *frames)
    assert here.next().error
    here.connector.close()
    other.close()


def test_an_engine_that_was_started_anew_knows_nothing_of_earlier_fetches() -> None:
    other = Impostor()
    here = Engine("decode", peers=(other.address,), connect_timeout=0.0)
    here.start()
    other.welcome(here)
    until(lambda: here.connector.available)
    here.connector.load(ask())
    other.take_ask()
    other.welcome(here, b"2")
    assert "anew" in here.next().error
    until(lambda: here.connector.available)
    here.connector.close()
    other.close()


def test_registered_memory_is_given_out_once_and_taken_back() -> None:
    room = Room(1000)
    assert room.take("a", 400, 1) == 0
    assert room.take("b", 400, 1) == 448
    with pytest.raises(TransferError, match="no room for 200 bytes"):
        room.take("c", 200, 0.01)
    room.free("a")
    room.free("a")
    assert room.take("c", 200, 1) == 0
    with pytest.raises(TransferError, match="do not fit"):
        room.take("d", 1001, 1)
