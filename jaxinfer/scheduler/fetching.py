"""Sequences whose prompts another engine computes: they hold blocks, but no batch slot."""

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from jaxinfer.kv_cache.manager import KVCacheManager, PrefixHit
from jaxinfer.request import Sequence, Status
from jaxinfer.scheduler.choices import parent_to_share


@dataclass(frozen=True)
class FetchPolicy:
    """When another engine computes a prompt.

    Attributes:
        min_tokens: least tokens of full blocks that this engine lacks; shorter ones are computed here.
        max_fetches: sequences that wait for such blocks at the same time; others wait for their turn.
        available: whether an engine is there that would do it.
    """

    min_tokens: int
    max_fetches: int
    available: Callable[[], bool]


@dataclass(frozen=True)
class Fetch:
    """Blocks that a sequence waits for.

    Attributes:
        num_tokens: tokens that are computed when they are there, those of prefix hits included. All but the last one of
            the prompt, so that the next step here is as short as any other; the last block may be partly filled.
        missing: numbers of the missing blocks in each group's table.
    """

    seq: Sequence
    num_tokens: int
    missing: tuple[range, ...]


class Fetches:
    """Which sequences are fetched, and what the scheduler decided since somebody asked.

    Args:
        policy: None: nothing is fetched.
        key: of a sequence's urgency.
    """

    def __init__(
        self, policy: FetchPolicy | None, kv: KVCacheManager, key: Callable[[Sequence], tuple[int, int]]
    ) -> None:
        self._policy = policy
        self._kv = kv
        self._key = key
        self.fetching: list[Sequence] = []
        """Sorted, most urgent first."""
        self._first: dict[Sequence, bytes] = {}
        """Digest of the first block that each of them waits for."""
        self.num_prompt_tokens = 0
        """Of those that are fetched."""
        self._started: list[Fetch] = []
        self._dropped: list[Sequence] = []

    @property
    def full(self) -> bool:
        return self._policy is not None and len(self.fetching) >= self._policy.max_fetches

    def candidate(self, seq: Sequence) -> bool:
        """Whether another engine may compute the prompt of a waiting sequence, if little of it is here. A choice that
        can share the blocks of another one asks nobody."""
        policy = self._policy
        if policy is None or not seq.may_fetch or any(seq.tables):
            return False
        if self._full_tokens(seq) < policy.min_tokens or not policy.available():
            return False
        return parent_to_share(seq, self._kv) is None

    def hit(self, seq: Sequence) -> PrefixHit | None:
        """What is here of a candidate's prompt; None if so little is missing that it is computed here."""
        assert self._policy is not None
        hit = self._kv.find(seq)
        held = min(len(table) for table in hit.tables) * self._kv.block_size
        if self._full_tokens(seq) - held < self._policy.min_tokens:
            seq.lacks = None
            return None
        seq.lacks = self._first_missing(seq, hit)
        return hit

    def has_to_wait(self, seq: Sequence) -> bool:
        """Whether a candidate that was looked up needs a fetch, and there is room for none, or the blocks that it lacks
        are on their way for another sequence and soon in the prefix cache.

        Looks nothing up, so that a pass over a long queue costs no look-up of every prompt in it.
        """
        on_their_way = self._kv.prefix_caching and seq.lacks in self._first.values()
        return seq.lacks is not None and (self.full or on_their_way)

    def start(self, seq: Sequence, hit: PrefixHit) -> bool:
        """Gives a sequence the blocks that it waits for; on False nothing changed."""
        num_tokens = self._num_tokens(seq)
        missing = self._kv.admit_remote(seq, hit, num_tokens, seq.num_tokens)
        if missing is None:
            return False
        seq.status = Status.FETCHING
        seq.lacks = None
        if seq.num_cached < 0:
            seq.num_cached = min(len(table) for table in hit.tables) * self._kv.block_size
        bisect.insort(self.fetching, seq, key=self._key)
        self.num_prompt_tokens += seq.num_prompt
        self._first[seq] = self._first_missing(seq, hit)
        self._started.append(Fetch(seq, num_tokens, missing))
        return True

    def remove(self, seq: Sequence) -> bytes:
        """Takes note that a sequence does not wait for blocks any more; the digest of the first of them."""
        self.fetching.remove(seq)
        self.num_prompt_tokens -= seq.num_prompt
        self._started = [fetch for fetch in self._started if fetch.seq is not seq]
        return self._first.pop(seq)

    def drop(self, seq: Sequence) -> None:
        """As ``remove``, for a sequence whose blocks others need: what arrives for it is of no use."""
        self.remove(seq)
        self._dropped.append(seq)

    @property
    def started(self) -> tuple[Fetch, ...]:
        """Decided, and not yet taken."""
        return tuple(self._started)

    @property
    def has_news(self) -> bool:
        return bool(self._started or self._dropped)

    def take_started(self) -> list[Fetch]:
        started, self._started = self._started, []
        return started

    def take_dropped(self) -> list[Sequence]:
        dropped, self._dropped = self._dropped, []
        return dropped

    def _first_missing(self, seq: Sequence, hit: PrefixHit) -> bytes:
        return self._kv.chain_digest(seq, min(len(table) for table in hit.tables) + 1)

    def _num_tokens(self, seq: Sequence) -> int:
        """Tokens of the prompt that another engine can compute; a sequence's last token is always computed here."""
        return min(seq.num_prompt, seq.num_tokens - 1)

    def _full_tokens(self, seq: Sequence) -> int:
        """Those of them that are in full blocks."""
        return self._num_tokens(seq) // self._kv.block_size * self._kv.block_size
