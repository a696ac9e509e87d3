"""NIXL: the receiver reads the sender's registered host memory (RDMA, shared memory or TCP, as UCX finds it)."""

import importlib
import threading
import time
import uuid
from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from jaxinfer.kv_transfer.connector import Array
from jaxinfer.kv_transfer.transport import ArrayShape, Frame, TransferError, num_bytes

STAGING = 64 << 20
"""Bytes of registered memory of each end. Content that waits to be read lies in it."""
_ALIGN = 64
_POLL = 0.0002
_PACKAGES = ("nixl_cu13", "nixl_cu12")


class _Where(msgspec.Struct, array_like=True):
    """Arrays of a piece, one behind the other, in the sender's memory."""

    address: int
    size: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Where).decode


def _api() -> ModuleType:
    """Raises:
    ImportError: no package of NIXL is installed.
    """
    for name in _PACKAGES:
        try:
            return importlib.import_module(f"{name}._api")
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise ImportError(f"there is no package {' or '.join(_PACKAGES)}")


class _Agent:
    """An agent of NIXL with memory that is registered once: what peers know of it stays true."""

    def __init__(self) -> None:
        api = _api()
        self.api: Any = api.nixl_agent(uuid.uuid4().hex, api.nixl_agent_config(backends=["UCX"]))
        self.memory = np.zeros(STAGING, np.uint8)
        self.base = int(self.memory.ctypes.data)
        self._registered = self.api.register_memory([(self.base, STAGING, 0, "")], "DRAM")

    def spans(self, address: int, size: int) -> Any:
        return self.api.get_xfer_descs([(address, size, 0)], "DRAM")

    def close(self) -> None:
        self.api.deregister_memory(self._registered)


class NixlSender:
    """Args:
    timeout: seconds that content waits for room, while receivers do not take what is there.
    """

    def __init__(self, timeout: float) -> None:
        self._agent = _Agent()
        self._timeout = timeout
        self._room = Room(STAGING)

    @property
    def address(self) -> bytes:
        return bytes(self._agent.api.get_agent_metadata())

    def pack(self, key: Hashable, arrays: Sequence[Array]) -> list[Frame]:
        parts = [np.ascontiguousarray(np.asarray(x)).view(np.uint8).reshape(-1) for x in arrays]
        size = sum(part.nbytes for part in parts)
        start = self._room.take(key, size, self._timeout)
        at = start
        for part in parts:
            self._agent.memory[at : at + part.nbytes] = part
            at += part.nbytes
        return [_encode(_Where(self._agent.base + start, size))]

    def free(self, key: Hashable) -> None:
        self._room.free(key)

    def close(self) -> None:
        self._agent.close()


class NixlReceiver:
    """Args:
    timeout: seconds that a read may take.
    """

    def __init__(self, timeout: float) -> None:
        self._agent = _Agent()
        self._timeout = timeout
        self._peers: dict[bytes, str] = {}

    def unpack(self, address: bytes, frames: Sequence[Frame], shapes: Sequence[ArrayShape]) -> list[Array]:
        size = sum(map(num_bytes, shapes))
        try:
            (where,) = (_decode(frame) for frame in frames)
        except (ValueError, msgspec.MsgspecError):
            raise TransferError("a message names no memory that could be read") from None
        if where.size != size or size > STAGING:
            raise TransferError(
                f"a message names {where.size} bytes, but the blocks have {size} of at most {STAGING}"
            )
        self._read(self._peer(address), where)
        arrays: list[Array] = []
        start = 0
        for shape in shapes:
            stop = start + num_bytes(shape)
            # The memory is used again for the next piece.
            arrays.append(self._agent.memory[start:stop].copy().view(shape[1]).reshape(shape[0]))
            start = stop
        return arrays

    def close(self) -> None:
        self._agent.close()

    def _peer(self, address: bytes) -> str:
        if address not in self._peers:
            self._peers[address] = self._agent.api.add_remote_agent(address)
        return self._peers[address]

    def _read(self, peer: str, where: _Where) -> None:
        api, agent = self._agent.api, self._agent
        local, remote = agent.spans(agent.base, where.size), agent.spans(where.address, where.size)
        try:
            handle = api.initialize_xfer("READ", local, remote, peer)
            state = api.transfer(handle)
            end = time.monotonic() + self._timeout
            while state == "PROC" and time.monotonic() < end:
                time.sleep(_POLL)
                state = api.check_xfer_state(handle)
            api.release_xfer_handle(handle)
        except Exception as error:  # the library's own exceptions have no common base
            raise TransferError(f"the memory could not be read: {type(error).__name__}: {error}") from error
        if state != "DONE":
            raise TransferError(f"the memory was not read within {self._timeout:g} s: {state}")


class Room:
    """Spans of a memory, by key; the first gap that is large enough is taken. Any thread may call."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._spans: dict[Hashable, tuple[int, int]] = {}
        self._changed = threading.Condition()

    def take(self, key: Hashable, size: int, timeout: float) -> int:
        """Where a span begins.

        Raises:
            TransferError: it is larger than the memory, or there is no room for it in time.
        """
        if size > self._size:
            raise TransferError(f"{size} bytes do not fit into {self._size} of registered memory")
        with self._changed:
            end = time.monotonic() + timeout
            while (start := self._gap(size)) is None:
                if not self._changed.wait(end - time.monotonic()):
                    raise TransferError(f"no room for {size} bytes within {timeout:g} s")
            self._spans[key] = (start, start + size)
            return start

    def free(self, key: Hashable) -> None:
        with self._changed:
            self._spans.pop(key, None)
            self._changed.notify_all()

    def _gap(self, size: int) -> int | None:
        at = 0
        for start, stop in sorted(self._spans.values()):
            if start - at >= size:
                return at
            at = -(-stop // _ALIGN) * _ALIGN
        return at if self._size - at >= size else None
