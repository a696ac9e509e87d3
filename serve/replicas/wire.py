"""What an ingress and a replica say to each other: msgpack, within the calls that the transport carries."""

from collections.abc import Sequence

import msgspec

from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.observability.snapshot import EngineSnapshot
from serve.process import wire

encode_requests = wire.encode_requests
decode_requests = wire.decode_requests


class Admitted(msgspec.Struct, tag="admitted", array_like=True):
    """The first message of a stream that begins: all requests are queued by the engine of ``replica``."""

    replica: str


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """The only message of a stream that does not begin."""

    replica: str
    failure: wire.Failure


class News(msgspec.Struct, tag="news", array_like=True):
    """What is new; of several deltas of a choice since the last message, one is made."""

    deltas: Sequence[OutputDelta]


class Lost(msgspec.Struct, tag="lost", array_like=True):
    """The last message of a stream whose engine died; the replica that says so is about to be replaced."""

    message: str


Message = Admitted | Refused | News | Lost


class Report(msgspec.Struct, array_like=True):
    """A replica's numbers, without its step records."""

    replica: str
    snapshot: EngineSnapshot
    healthy: bool


encode = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(Message).decode
decode_ready = msgspec.msgpack.Decoder(wire.Ready).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
