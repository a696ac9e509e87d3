"""How the content of blocks travels: one interface over several ways."""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from jaxinfer.kv_transfer.connector import Array

Frame = Any
"""bytes, memoryview or ``zmq.Frame``: a part of a message."""
ArrayShape = tuple[tuple[int, ...], np.dtype]


class TransferError(RuntimeError):
    """Content could not be sent or fetched; the fetch it belongs to fails."""


class Sender(Protocol):
    """The end of a prefill engine. ``pack`` is called on one thread, the others on any."""

    @property
    def address(self) -> bytes:
        """What a receiver has to know of this engine."""
        ...

    def pack(self, key: Hashable, arrays: Sequence[Array]) -> list[Frame]:
        """Makes arrays ready to be taken, and waits until they are computed.

        Args:
            key: for ``free``.

        Returns:
            What the receiver's ``unpack`` gets.

        Raises:
            TransferError: there is no room for them in time.
        """
        ...

    def free(self, key: Hashable) -> None:
        """The receiver took the arrays, or is gone; unknown keys are ignored."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The end of a decode engine; one of them for each prefill engine, used on one thread."""

    def unpack(self, address: bytes, frames: Sequence[Frame], shapes: Sequence[ArrayShape]) -> list[Array]:
        """The arrays of a message, complete.

        Args:
            address: of the sender.
            shapes: of the arrays, as this engine expects them; not what the other side says.

        Raises:
            TransferError: they do not come, or are something else.
        """
        ...

    def close(self) -> None: ...


def num_bytes(shape: ArrayShape) -> int:
    dims, dtype = shape
    return int(np.prod(dims, dtype=np.int64)) * dtype.itemsize
