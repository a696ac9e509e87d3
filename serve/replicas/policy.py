"""Which replica gets a request: pure decisions of one ingress about the replicas of one model."""

import hashlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from serve.replicas.config import RoutingConfig
from serve.replicas.prefixes import PlacedPrefixes


@dataclass(frozen=True)
class RouteKey:
    """What a decision looks at of a request.

    Attributes:
        digests: of the full blocks of its prompt, the keys of the prefix cache.
        num_tokens: prompt tokens to compute if nothing is cached.
        block_size: tokens of a block.
        avoid: replicas that it was tried on.
    """

    digests: tuple[bytes, ...] = ()
    num_tokens: int = 0
    block_size: int = 1
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Candidate:
    """A replica that could get a request.

    Attributes:
        in_flight: requests that it has, waiting ones included.
        kv_usage: share of its KV blocks in use, 0 to 1.
    """

    replica: str
    in_flight: float = 0.0
    kv_usage: float = 0.0


class Policy(Protocol):
    def rank(self, candidates: Sequence[Candidate], key: RouteKey) -> list[str]:
        """Replicas, best first; those to avoid come last, for nothing else may be left."""
        ...

    def placed(self, replica: str, key: RouteKey) -> None:
        """The request went to a replica."""
        ...

    def keep(self, replicas: Collection[str]) -> None:
        """There are no others any more."""
        ...


class RoundRobin:
    """Each in its turn."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def rank(self, candidates: Sequence[Candidate], key: RouteKey) -> list[str]:
        names = sorted(candidate.replica for candidate in candidates)
        if not names:
            return []
        turn = next(self._turns) % len(names)
        return sorted(names[turn:] + names[:turn], key=lambda name: name in key.avoid)

    def placed(self, replica: str, key: RouteKey) -> None:
        """Nothing is remembered."""

    def keep(self, replicas: Collection[str]) -> None:
        """As above."""


class PrefixAware:
    """The replica with the least work ahead, in prompt tokens::

        tokens that it has not cached + request_tokens x requests in flight + kv_tokens x KV usage above kv_limit

    So a cached prefix of k tokens is worth waiting behind k / ``request_tokens`` requests, whatever the number of
    replicas, and a popular prefix spreads to the next replica when its own one is that much busier. Replicas with
    ``max_imbalance`` requests more than the least loaded one are not preferred whatever they have cached.

    Equal costs, as those of a prompt that nobody has seen, go by rendezvous hashing (Thaler and Ravishankar, 1998) of
    the first block that is not known everywhere: ingresses that know nothing of each other choose the same replica.
    """

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        self._prefixes = PlacedPrefixes(config.remembered_blocks)

    def rank(self, candidates: Sequence[Candidate], key: RouteKey) -> list[str]:
        if not candidates:
            return []
        matched = {c.replica: self._prefixes.matched(c.replica, key.digests) for c in candidates}
        most = max(matched.values())
        tie = key.digests[most] if most < len(key.digests) else b"".join(key.digests[-1:])
        least = min(candidate.in_flight for candidate in candidates)

        def order(candidate: Candidate) -> tuple[bool, bool, float, bytes]:
            name = candidate.replica
            overloaded = candidate.in_flight - least > self._config.max_imbalance
            return name in key.avoid, overloaded, self._cost(candidate, matched[name], key), _hash(name, tie)

        return [candidate.replica for candidate in sorted(candidates, key=order)]

    def placed(self, replica: str, key: RouteKey) -> None:
        self._prefixes.add(replica, key.digests)

    def keep(self, replicas: Collection[str]) -> None:
        self._prefixes.keep(replicas)

    def _cost(self, candidate: Candidate, matched: int, key: RouteKey) -> float:
        config = self._config
        missing = max(key.num_tokens - matched * key.block_size, 0)
        over = max(candidate.kv_usage - config.kv_limit, 0.0) / (1.0 - config.kv_limit)
        return missing + config.request_tokens * candidate.in_flight + config.kv_tokens * over


def make_policy(config: RoutingConfig) -> Policy:
    return RoundRobin() if config.policy == "round_robin" else PrefixAware(config)


def _hash(replica: str, tie: bytes) -> bytes:
    return hashlib.blake2b(tie + replica.encode(), digest_size=8).digest()
