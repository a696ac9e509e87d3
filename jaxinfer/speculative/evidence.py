"""How much a look-up promises: the longer the stretch at the end of a sequence that occurred before, the more.

Drafters that look tokens up know before a step whether they would have drafts, and how far back the match reaches says
how likely these are. So acceptance is learned by classes of that length, and a request that begins to repeat something
gets drafts at once, whatever other text was like.
"""

from bisect import bisect_right
from collections.abc import Callable

from jaxinfer.request import Sequence

LENGTHS = (1, 3, 5, 9)
"""Shortest match, in tokens, of each class from 1 on."""

MAX_MATCH = LENGTHS[-1]
"""Longer matches need not be told apart."""

NOTHING = 0
"""Class of a sequence without a match; and of all sequences, where the drafter is not one that looks up."""

Evidence = Callable[[Sequence], int]
"""The class of a sequence by its known tokens; there may be others in flight."""


def class_of(match: int) -> int:
    """Class of a match of so many tokens."""
    return bisect_right(LENGTHS, match)
