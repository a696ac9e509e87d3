"""Content inside the messages: copied to the host, sent over ZeroMQ, copied to the device."""

from collections.abc import Hashable, Sequence

import numpy as np

from jaxinfer.kv_transfer.connector import Array
from jaxinfer.kv_transfer.transport import ArrayShape, Frame, TransferError, num_bytes


class HostSender:
    address = b""

    def pack(self, key: Hashable, arrays: Sequence[Array]) -> list[Frame]:
        return [np.ascontiguousarray(np.asarray(x)).view(np.uint8).reshape(-1).data for x in arrays]

    def free(self, key: Hashable) -> None:
        """Messages belong to ZeroMQ."""

    def close(self) -> None:
        """There is nothing to close."""


class HostReceiver:
    def unpack(self, address: bytes, frames: Sequence[Frame], shapes: Sequence[ArrayShape]) -> list[Array]:
        expected = [num_bytes(shape) for shape in shapes]
        buffers = [memoryview(frame) for frame in frames]
        if [buffer.nbytes for buffer in buffers] != expected:
            raise TransferError(
                f"a message holds {[b.nbytes for b in buffers]} bytes, but the blocks have {expected}"
            )
        return [
            np.frombuffer(buffer, np.uint8).view(dtype).reshape(dims)
            for buffer, (dims, dtype) in zip(buffers, shapes)
        ]

    def close(self) -> None:
        """There is nothing to close."""
