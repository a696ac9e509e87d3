"""What a decode engine and a prefill engine say to each other: msgpack over ZeroMQ."""

from typing import Annotated

import msgspec

from jaxinfer.config_disaggregation import MAX_SECONDS
from jaxinfer.kv_transfer.layout import EngineCard

Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]


class Hello(msgspec.Struct, tag="hello", frozen=True, array_like=True):
    """From the decode engine, at every heartbeat: it is there, and this is what it can take.

    Attributes:
        heartbeat: seconds between two of these.
        timeout: seconds after which it waits for no fetch any more.
    """

    card: EngineCard
    heartbeat: Seconds
    timeout: Seconds


class Welcome(msgspec.Struct, tag="welcome", frozen=True, array_like=True):
    """The answer to ``Hello``, also if the cards do not fit. Comes unasked when the engine begins to drain.

    Attributes:
        instance: of the prefill engine; another one after a restart, which knows nothing of earlier fetches.
        data: address for the transport.
        draining: it takes no asks any more, as it is to stop.
    """

    instance: bytes
    card: EngineCard
    data: bytes
    draining: bool = False


class Ask(msgspec.Struct, tag="ask", frozen=True, array_like=True):
    """Asks for blocks of a prompt.

    Attributes:
        fetch: number of the fetch, repeated in all that concerns it.
        token_ids: of the blocks that are wanted, and of those before them; the last one need not be full.
        first: number of the first missing block of each group; all from there on are missing.
        digest: of the chain of the full ones of these blocks, as both engines file them.
        priority, cache_salt: of the request.
    """

    fetch: int
    token_ids: tuple[int, ...]
    first: tuple[int, ...]
    digest: bytes
    priority: int
    cache_salt: str | None


class Cancel(msgspec.Struct, tag="cancel", frozen=True, array_like=True):
    """Nobody waits for these blocks any more."""

    fetch: int


class Got(msgspec.Struct, tag="got", frozen=True, array_like=True):
    """A piece was taken, or is of no use: what it holds on the other side may go."""

    fetch: int
    piece: int


class Piece(msgspec.Struct, tag="piece", frozen=True, array_like=True):
    """Blocks ``start`` to ``stop`` of some layers of a group. Frames of the transport follow.

    Attributes:
        piece: number of the piece within the fetch.
        digest: as in ``Ask``.
    """

    fetch: int
    piece: int
    group: int
    layers: tuple[int, ...]
    start: int
    stop: int
    digest: bytes


class End(msgspec.Struct, tag="end", frozen=True, array_like=True):
    """The last message of a fetch: all blocks were sent and are sound, or why they do not come."""

    fetch: int
    error: str | None = None


FromDecode = Hello | Ask | Cancel | Got
FromPrefill = Welcome | Piece | End

encode = msgspec.msgpack.Encoder().encode
decode_from_decode = msgspec.msgpack.Decoder(FromDecode).decode
decode_from_prefill = msgspec.msgpack.Decoder(FromPrefill).decode
