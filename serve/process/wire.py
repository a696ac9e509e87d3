"""What the API process and the engine process say to each other: msgpack over local sockets."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from jaxinfer.engine.client import EngineDrainingError, EngineRequest
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.engine.inputs import Limits
from jaxinfer.observability.snapshot import EngineSnapshot
from jaxinfer.request import QueueFullError, RequestError

if TYPE_CHECKING:
    from jaxinfer.engine.build import Engine

SETUP, COMMANDS, NEWS = "setup", "commands", "news"
"""Files of the private directory: how to start, and the sockets."""

Operation = Literal["reset_prefix_cache", "start_profile", "stop_profile", "block_owners", "drain"]


class Setup(msgspec.Struct, array_like=True):
    """What the engine process starts from; ``config`` is JSON."""

    config: str
    log_level: int


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """Attributes:
    number: repeated in the ``Reply``.
    keys: the core's ids of the requests.
    requests: see ``encode_requests``; read apart, so that requests that cannot be read still get their reply.
    """

    number: int
    keys: tuple[str, ...]
    requests: msgspec.Raw


class Abort(msgspec.Struct, tag="abort", array_like=True):
    keys: tuple[str, ...]


class Call(msgspec.Struct, tag="call", array_like=True):
    """Asks for anything else; ``argument`` is the directory of a profile."""

    number: int
    operation: Operation
    argument: str = ""


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """The last command."""


Command = Submit | Abort | Call | Stop


class Failure(msgspec.Struct, array_like=True):
    """An exception; ``kind`` is one of ``_KINDS``, or the name of its class."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        param = error.param if isinstance(error, RequestError) else None
        return cls(type(error).__name__, str(error), param)

    def error(self) -> Exception:
        """The exception for the caller on the other side."""
        if self.kind == RequestError.__name__:
            return RequestError(self.message, self.param)
        return _KINDS.get(self.kind, RuntimeError)(self.message)


_KINDS: dict[str, type[Exception]] = {
    QueueFullError.__name__: QueueFullError,
    EngineDrainingError.__name__: EngineDrainingError,
}


class Progress(msgspec.Struct, tag="progress", array_like=True):
    """A part of the start: ``done`` of ``total``."""

    what: str
    done: int
    total: int


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine is built. ``text_path`` is where the tokenizer is, if there is one."""

    limits: Limits
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, Any]
    text_path: str | None

    @classmethod
    def of(cls, engine: "Engine") -> "Ready":
        text_path = None if engine.text_path is None else str(engine.text_path)
        return cls(engine.limits, engine.inputs.eos_token_ids, engine.sampling_defaults, text_path)


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The engine could not be built (then ``user_error`` says whether model or configuration are at fault), or its
    loop ended."""

    message: str
    user_error: bool = False


class Reply(msgspec.Struct, tag="reply", array_like=True):
    number: int
    value: int | tuple[int, ...] | None = None
    failure: Failure | None = None


class News(msgspec.Struct, tag="news", array_like=True):
    """All that is new after a turn of the loop.

    Attributes:
        snapshot: at most some per second; the step records in it are those since the last one.
    """

    deltas: list[OutputDelta]
    snapshot: EngineSnapshot | None = None


class Beat(msgspec.Struct, tag="beat", array_like=True):
    """The engine process is alive; ``stalled_for`` seconds without a finished step although work waits."""

    stalled_for: float


Message = News | Reply | Beat | Progress | Ready | Failed


def encode_requests(requests: Sequence[EngineRequest]) -> msgspec.Raw:
    """Raises:
    RequestError: there is something in them that no message can hold.
    OverflowError: that is an integer.
    """
    try:
        return msgspec.Raw(encode(requests))
    except (UnicodeEncodeError, TypeError, RecursionError) as error:
        raise RequestError(
            f"the request holds something that is no data or no Unicode text: {error}"
        ) from None


def decode_requests(data: msgspec.Raw) -> tuple[EngineRequest, ...]:
    """Raises:
    RequestError: they are not valid.
    """
    try:
        return _decode_requests(data)
    except msgspec.MsgspecError as error:
        raise RequestError(f"the request cannot be read: {error}") from None


encode = msgspec.msgpack.Encoder().encode
_decode_requests = msgspec.msgpack.Decoder(tuple[EngineRequest, ...]).decode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_message = msgspec.msgpack.Decoder(Message).decode
