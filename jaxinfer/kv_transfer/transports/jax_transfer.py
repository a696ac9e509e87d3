"""``jax.experimental.transfer``: the receiver pulls arrays from device to device."""

import datetime
import itertools
import time
from collections.abc import Hashable, Sequence

import jax
import msgspec
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from jaxinfer.kv_transfer.connector import Array
from jaxinfer.kv_transfer.transport import ArrayShape, Frame, TransferError

_POLL = 0.0005

_encode = msgspec.msgpack.Encoder().encode
_decode_number = msgspec.msgpack.Decoder(int).decode


def _start_server(host: str) -> "transfer.TransferServer":
    bracketed = f"[{host}]" if ":" in host else host
    address = f"{bracketed}:0"
    return transfer.start_transfer_server(jax.devices()[0].client, address, [address])


class JaxSender:
    """Arrays wait in a server of JAX's until they are pulled, or ``keep`` seconds are over.

    Args:
        host: address to listen on; two free ports are taken.
    """

    def __init__(self, host: str, keep: float) -> None:
        self._server = _start_server(host)
        self._keep = datetime.timedelta(seconds=keep)
        self._numbers = itertools.count(1)

    @property
    def address(self) -> bytes:
        return str(self._server.address()).encode()

    def pack(self, key: Hashable, arrays: Sequence[Array]) -> list[Frame]:
        device = jax.devices()[0]
        whole = [jax.device_put(x, device) for x in arrays]
        number = next(self._numbers)
        self._server.await_pull(number, whole, timeout=datetime.datetime.now() + self._keep)
        jax.block_until_ready(whole)
        return [_encode(number)]

    def free(self, key: Hashable) -> None:
        """The server lets go of what was pulled, or has waited too long."""

    def close(self) -> None:
        """The server ends with the process."""


class JaxReceiver:
    """Args:
    host: address of this engine's own server, which a connection needs.
    timeout: seconds that a pull may take.
    """

    def __init__(self, host: str, timeout: float) -> None:
        self._server = _start_server(host)
        self._timeout = timeout
        self._connections: dict[bytes, transfer.TransferConnection] = {}

    def unpack(self, address: bytes, frames: Sequence[Frame], shapes: Sequence[ArrayShape]) -> list[Array]:
        try:
            (number,) = (_decode_number(frame) for frame in frames)
        except (ValueError, msgspec.MsgspecError):
            raise TransferError("a message names no arrays that could be pulled") from None
        if address not in self._connections:
            self._connections = {address: self._server.connect(address.decode())}
        sharding = SingleDeviceSharding(jax.devices()[0])
        structs = [jax.ShapeDtypeStruct(dims, dtype, sharding=sharding) for dims, dtype in shapes]
        try:
            arrays = list(self._connections[address].pull(number, structs))
            self._wait(arrays)
        except (RuntimeError, ValueError) as error:
            self._connections.clear()
            raise TransferError(f"the arrays could not be pulled: {error}") from error
        return arrays

    def _wait(self, arrays: list[jax.Array]) -> None:
        """Until the arrays are there. A pull from an engine that is gone may never end, and one that failed must not
        reach the cache."""
        end = time.monotonic() + self._timeout
        while not all(x.is_ready() for x in arrays):  # type: ignore[attr-defined]
            if time.monotonic() > end:
                raise TransferError(f"the arrays did not come within {self._timeout:g} s")
            time.sleep(_POLL)
        jax.block_until_ready(arrays)

    def close(self) -> None:
        """The server ends with the process."""
