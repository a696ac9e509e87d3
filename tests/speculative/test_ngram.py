"""Prompt lookup."""

from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.speculative.ngram import NgramIndex


def rescan(tokens: list[int], sizes: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """The same by looking through everything."""
    for n in sizes:
        tail = tokens[-n:]
        for start in range(len(tokens) - n - 1, -1, -1):
            if n <= len(tokens) and tokens[start : start + n] == tail:
                at = start + n
                return tuple(tokens[at + i % (len(tokens) - at)] for i in range(limit))
    return ()


@given(
    tokens=st.lists(st.integers(0, 2), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    limit=st.integers(1, 9),
)
def test_it_finds_what_a_rescan_finds_however_the_tokens_arrive(tokens, cuts, limit):
    index = NgramIndex((3, 2))
    done = 0
    for cut in [*sorted(cuts), len(tokens)]:
        index.extend(tokens[done:cut])
        done = max(done, min(cut, len(tokens)))
        assert index.propose(limit) == rescan(tokens[:done], (3, 2), limit)


def test_a_period_is_continued():
    index = NgramIndex((2,))
    index.extend([1, 2, 3, 1, 2, 3, 1, 2])
    assert index.propose(7) == (3, 1, 2, 3, 1, 2, 3)


def test_the_longest_match_wins_and_then_the_newest():
    index = NgramIndex((3, 1))
    index.extend([7, 8, 9, 1, 5, 9, 2, 9, 3, 7, 8, 9])
    assert index.propose(1) == (1,)
    index = NgramIndex((1,))
    index.extend([9, 1, 9, 2, 9])
    assert index.propose(1) == (2,)


def test_nothing_known_means_no_drafts():
    index = NgramIndex((2,))
    assert index.propose(4) == ()
    index.extend([1, 2, 3])
    assert index.propose(4) == ()
