"""What an ingress knows about cached prefixes: which replica got which prompt."""

from collections import OrderedDict
from collections.abc import Collection, Sequence


class PlacedPrefixes:
    """Digests of the prompt blocks that each replica got, the newest ones of each.

    They are the keys of the replicas' prefix caches, so a remembered block is a hit as long as the replica has not
    evicted it: with ``limit`` at the size of its pool, this list forgets about as fast as the replica.

    Args:
        limit: blocks remembered of one replica.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: dict[str, OrderedDict[bytes, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def matched(self, replica: str, digests: Sequence[bytes]) -> int:
        """Leading blocks of a prompt that a replica got before."""
        held = self._blocks.get(replica)
        if not held:
            return 0
        for count, digest in enumerate(digests):
            if digest not in held:
                return count
        return len(digests)

    def add(self, replica: str, digests: Sequence[bytes]) -> None:
        """Notes that a replica computes a prompt."""
        held = self._blocks.setdefault(replica, OrderedDict())
        for digest in reversed(digests):  # the first block is the newest: without it the others are no use
            held[digest] = None
            held.move_to_end(digest)
        while len(held) > self._limit:
            held.popitem(last=False)

    def keep(self, replicas: Collection[str]) -> None:
        """Forgets all other replicas."""
        for gone in self._blocks.keys() - set(replicas):
            del self._blocks[gone]
