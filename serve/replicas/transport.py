"""How an ingress reaches the replicas of one model."""

from collections.abc import AsyncGenerator
from typing import Protocol

from serve.replicas.policy import RouteKey


class ReplicaLostError(RuntimeError):
    """The replica of a stream died, or its engine did.

    Attributes:
        replica: its name, if it is known.
    """

    def __init__(self, message: str, replica: str | None = None) -> None:
        super().__init__(message)
        self.replica = replica


class Transport(Protocol):
    """Messages are those of ``serve.replicas.wire``. All methods are called on one event loop."""

    async def describe(self) -> bytes:
        """A ``Ready`` of any replica; waits until there is one."""
        ...

    def generate(self, submission: bytes, key: RouteKey) -> AsyncGenerator[bytes, None]:
        """The messages of ``Replica.generate`` of the replica that is chosen by ``key``; waits until there is one.
        Closing it closes the stream of the replica.

        Raises:
            ReplicaLostError: from the iteration.
        """
        ...

    async def reports(self) -> list[bytes]:
        """A ``Report`` of each replica; none of one that dies meanwhile.

        Raises:
            TimeoutError: a replica does not answer.
        """
        ...

    async def reset_prefix_cache(self) -> int:
        """Of all replicas; returns how many blocks were forgotten.

        Raises:
            TimeoutError: a replica does not answer.
        """
        ...
