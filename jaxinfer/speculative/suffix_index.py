"""What followed a stretch of tokens before, and how often: the index of suffix decoding.

A suffix tree would hold all of this, but neither forgets its oldest tokens nor fits in little memory. Here each token
has a *place*, which grows by one, and three kinds of links: to the token before it and behind it in its sequence, and
per n-gram length to the place before it that ends the same n-gram. A hash table holds the newest place of each n-gram.
Adding a token and forgetting the oldest one cost the same whatever the index holds.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

MAX_MATCH = 64
"""Longest match that is told from longer ones, in tokens."""

MAX_OCCURRENCES = 32
"""Newest occurrences of an n-gram that are looked at."""

NONE = -1
"""No place. Smaller numbers are places of the tokens that are being guessed: -2 is the first of them."""


class Guess(NamedTuple):
    """Attributes:
    tokens: that may follow.
    score: how many of them are expected to be right, if the past is a guide.
    """

    tokens: tuple[int, ...]
    score: float


NOTHING = Guess((), 0.0)


class SuffixIndex:
    """Tokens of one or many sequences, the newest ``capacity`` of them, and where each n-gram of them ends.

    Args:
        sizes: lengths of n-grams, longest first. The longest one that is found decides which occurrences are compared.
        capacity: most tokens; None: all are kept.
        minimum: drafts end where the share of the occurrences that went on like this falls below it.
        factor: most drafts per token of the match.
    """

    def __init__(self, sizes: Sequence[int], capacity: int | None, minimum: float, factor: float) -> None:
        self._sizes = tuple(sizes)
        self._capacity = capacity
        self._minimum = minimum
        self._factor = factor
        self._count = 0
        """Places given out."""
        self._token = array("q")
        self._before = array("q")
        self._behind = array("q")
        self._same = [array("q") for _ in self._sizes]
        self._key = [array("q") for _ in self._sizes]
        self._newest: list[dict[int, int]] = [{} for _ in self._sizes]

    def __len__(self) -> int:
        """Tokens held."""
        return len(self._token)

    @property
    def num_keys(self) -> int:
        """N-grams that can be found; at most one per token and length."""
        return sum(len(newest) for newest in self._newest)

    def extend(self, token_ids: Sequence[int], end: int = NONE) -> int:
        """Adds tokens behind those of a sequence.

        Args:
            end: place of the last token of the sequence; NONE for a new one.

        Returns:
            The place of the last token by now.
        """
        longest = self._sizes[0]
        tail = self._tokens_before(end, longest)
        for token in token_ids:
            tail = [*tail[-(longest - 1) :], token] if longest > 1 else [token]
            end = self._add(token, end, tail)
        return end

    def guess(self, context: Sequence[int], limit: int, end: int = NONE) -> Guess:
        """What may follow, by what followed the longest stretch at the end of the context.

        Args:
            context: newest tokens of a sequence; ``MAX_MATCH`` of them matter.
            limit: most drafts.
            end: place of the context's last token, if it is part of the index and an occurrence that reaches it goes
                on with the guess itself: a period is continued as a period.
        """
        for level, n in enumerate(self._sizes):
            places, length = self._occurrences(level, n, context, end)
            if places:
                return self._follow(places, min(limit, max(1, int(self._factor * length))), end)
        return NOTHING

    def match(self, context: Sequence[int], end: int = NONE) -> int:
        """Tokens of the longest stretch at the end of the context that something followed; see ``guess``."""
        for level, n in enumerate(self._sizes):
            places, length = self._occurrences(level, n, context, end)
            if places:
                return length
        return 0

    # ---- adding and forgetting

    def _add(self, token: int, before: int, tail: list[int]) -> int:
        place = self._count
        self._count += 1
        slot = self._slot(place)
        if slot < len(self._token):
            self._forget(slot, place - len(self._token))
            self._token[slot], self._before[slot], self._behind[slot] = token, before, NONE
        else:
            self._token.append(token)
            self._before.append(before)
            self._behind.append(NONE)
            for links in (*self._same, *self._key):
                links.append(NONE)
        if self._holds(before):
            self._behind[self._slot(before)] = place
        for level, n in enumerate(self._sizes):
            known = n <= len(tail)
            key = hash(tuple(tail[-n:])) if known else NONE
            self._key[level][slot] = key
            self._same[level][slot] = self._newest[level].get(key, NONE) if known else NONE
            if known:
                self._newest[level][key] = place
        return place

    def _forget(self, slot: int, place: int) -> None:
        """Drops what leads to the oldest place; links to it are known by its number."""
        for newest, keys in zip(self._newest, self._key):
            if newest.get(keys[slot]) == place:
                del newest[keys[slot]]

    def _slot(self, place: int) -> int:
        return place if self._capacity is None else place % self._capacity

    def _holds(self, place: int) -> bool:
        return place >= max(0, self._count - len(self._token))

    # ---- looking up

    def _tokens_before(self, end: int, count: int) -> list[int]:
        """Up to ``count`` tokens of a sequence, the one at ``end`` last."""
        tokens: list[int] = []
        while len(tokens) < count and self._holds(end):
            tokens.append(self._token[self._slot(end)])
            end = self._before[self._slot(end)]
        return tokens[::-1]

    def _occurrences(self, level: int, n: int, context: Sequence[int], end: int) -> tuple[list[int], int]:
        """Ends of the longest earlier occurrences of the context's end, newest first, and their length."""
        if n > len(context):
            return [], 0
        place = self._newest[level].get(hash(tuple(context[-n:])), NONE)
        best = n
        found: list[int] = []
        for _ in range(MAX_OCCURRENCES):
            if not self._holds(place):
                break
            slot = self._slot(place)
            if place != end and self._behind[slot] != NONE:
                length = self._match(place, context)  # shorter than n only if two n-grams have one hash
                if length > best:
                    best, found = length, []
                if length == best:
                    found.append(place)
            place = self._same[level][slot]
        return found, best

    def _match(self, place: int, context: Sequence[int]) -> int:
        length = 0
        for token in reversed(context[-MAX_MATCH:]):
            if not self._holds(place) or self._token[self._slot(place)] != token:
                break
            length += 1
            place = self._before[self._slot(place)]
        return length

    def _follow(self, places: list[int], limit: int, end: int) -> Guess:
        """The most frequent continuation token by token; the newest one of equals."""
        drafts: list[int] = []
        probability, score = 1.0, 0.0
        while len(drafts) < limit:
            behind = self._next(places, drafts, end)
            if not behind:
                break
            token, count = Counter(token for _, token in behind).most_common(1)[0]
            probability *= count / len(places)
            if probability < self._minimum:
                break
            drafts.append(token)
            score += probability
            places = [place for place, other in behind if other == token]
        return Guess(tuple(drafts), score)

    def _next(self, places: list[int], drafts: list[int], end: int) -> list[tuple[int, int]]:
        """The places behind, and their tokens."""
        behind = []
        for place in places:
            after = place - 1 if place < NONE else -2 if place == end else self._behind[self._slot(place)]
            if after < NONE:
                behind.append((after, drafts[-2 - after]))
            elif self._holds(after):
                behind.append((after, self._token[self._slot(after)]))
        return behind
