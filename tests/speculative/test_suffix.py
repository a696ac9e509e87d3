"""Suffix decoding: the index against a rescan, and what the drafter shares and keeps apart."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.request import Request, Sequence
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.drafter import DraftJob
from jaxinfer.speculative.suffix import SuffixDrafter
from jaxinfer.speculative.suffix_index import MAX_OCCURRENCES, NONE, Guess, SuffixIndex

SIZES = (4, 2)
MINIMUM, FACTOR = 0.3, 1.5


class Rescan:
    """The same by looking through everything: ``(sequence, index)`` of each token in the order of arrival."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.sequences: dict[int, list[int]] = {}
        self.order: list[tuple[int, int]] = []

    def add(self, name: int, token: int) -> None:
        tokens = self.sequences.setdefault(name, [])
        self.order.append((name, len(tokens)))
        tokens.append(token)

    def guess(self, context: list[int], limit: int) -> Guess:
        held = self.order[-self.capacity :] if self.capacity else self.order
        lengths = {at: self.match(at, context, set(held)) for at in reversed(held)}
        # A newer token of the same sequence is held whenever an older one is.
        lengths = {(name, i): n for (name, i), n in lengths.items() if i + 1 < len(self.sequences[name])}
        for size in SIZES:
            if size <= len(context) and max(lengths.values(), default=0) >= size:
                best = max(lengths.values())
                return self.follow(
                    [at for at, n in lengths.items() if n == best], min(limit, max(1, int(FACTOR * best)))
                )
        return Guess((), 0.0)

    def match(self, at: tuple[int, int], context: list[int], held: set[tuple[int, int]]) -> int:
        name, i = at
        n = 0
        while n < len(context) and (name, i - n) in held and self.sequences[name][i - n] == context[-1 - n]:
            n += 1
        return n

    def follow(self, places: list[tuple[int, int]], limit: int) -> Guess:
        drafts: list[int] = []
        probability, score = 1.0, 0.0
        while len(drafts) < limit:
            behind = [(name, i + 1) for name, i in places if i + 1 < len(self.sequences[name])]
            if not behind:
                break
            token, count = Counter(self.sequences[name][i] for name, i in behind).most_common(1)[0]
            probability *= count / len(places)
            if probability < MINIMUM:
                break
            drafts.append(token)
            score += probability
            places = [(name, i) for name, i in behind if self.sequences[name][i] == token]
        return Guess(tuple(drafts), score)


@given(
    tokens=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=MAX_OCCURRENCES),
    capacity=st.sampled_from([None, 7, 15]),
    context=st.lists(st.integers(0, 2), max_size=8),
    limit=st.integers(1, 9),
)
def test_it_finds_what_a_rescan_finds_in_interleaved_sequences_of_which_the_oldest_are_forgotten(
    tokens, capacity, context, limit
):
    index, rescan = SuffixIndex(SIZES, capacity, MINIMUM, FACTOR), Rescan(capacity)
    ends: dict[int, int] = {}
    for name, token in tokens:
        ends[name] = index.extend([token], ends.get(name, NONE))
        rescan.add(name, token)
    assert index.guess(context, limit) == rescan.guess(context, limit)
    assert len(index) <= (capacity or len(tokens))
    assert index.num_keys <= len(SIZES) * len(index)


@given(tokens=st.lists(st.integers(0, 2), max_size=20), cuts=st.lists(st.integers(0, 20), max_size=3))
def test_the_pieces_in_which_tokens_arrive_do_not_matter(tokens, cuts):
    whole, pieces = (SuffixIndex(SIZES, 9, MINIMUM, FACTOR) for _ in range(2))
    whole.extend(tokens)
    end, done = NONE, 0
    for cut in [*sorted(cuts), len(tokens)]:
        end = pieces.extend(tokens[done:cut], end)
        done = max(done, min(cut, len(tokens)))
    assert pieces.guess(tokens, 5) == whole.guess(tokens, 5)


def test_a_period_is_continued_and_a_longer_match_allows_more_drafts():
    index = SuffixIndex((2,), None, 0.2, 2.0)
    end = index.extend([1, 2, 3, 1, 2, 3, 1, 2])
    assert index.guess([1, 2, 3, 1, 2, 3, 1, 2], 9, end).tokens == (3, 1, 2, 3, 1, 2, 3, 1, 2)
    assert index.guess([9, 1, 2], 9, end).tokens == (3, 1, 2, 3)


def test_the_most_frequent_continuation_wins_and_a_rare_one_ends_the_draft():
    index = SuffixIndex((2,), None, 0.5, 3.0)
    for third, fourth in ((7, 1), (8, 1), (7, 2), (7, 3)):
        index.extend([5, 6, third, fourth])
    guess = index.guess([5, 6], 6)
    assert guess.tokens == (7,)
    assert guess.score == 0.75


def sequence(prompt: list[int], output: list[int], salt: str | None = None) -> Sequence:
    request = Request("r", None, tuple(prompt), SamplingParams(), cache_salt=salt)
    seq = Sequence(request, 0, 0, 100, (0, 0))
    seq.output_token_ids.extend(output)
    return seq


def propose(drafter: SuffixDrafter, *sequences: Sequence, limit: int = 4) -> list[tuple[int, ...]]:
    return drafter.propose([DraftJob(seq, limit, limit) for seq in sequences])


CONFIG = SpeculativeConfig(drafter="suffix")
ANSWER = [11, 12, 13, 14, 15, 16]


def test_outputs_of_finished_and_running_sequences_are_drafts_for_others():
    drafter = SuffixDrafter(CONFIG)
    running = sequence([1, 2], ANSWER)
    assert propose(drafter, running, sequence([3, 4], ANSWER[:2])) == [(), (13, 14, 15, 16)]
    drafter.forget(running)
    assert propose(drafter, sequence([3, 4], ANSWER[:2])) == [(13, 14, 15, 16)]
    assert propose(drafter, sequence([3, 5], [])) == [()]


def test_an_answer_follows_the_end_of_its_prompt():
    drafter = SuffixDrafter(CONFIG)
    drafter.forget(sequence([1, 2, 3], ANSWER))
    assert propose(drafter, sequence([7, 2, 3], [])) == [(11, 12, 13, 14)]


def test_salts_see_nothing_of_each_other():
    """Neither drafts nor what is forgotten depend on requests under other salts."""
    for seen, asking in ((None, "a"), ("a", None), ("a", "b"), ("a", "")):
        drafter = SuffixDrafter(CONFIG)
        drafter.forget(sequence([1, 2], ANSWER, seen))
        assert propose(drafter, sequence([1, 2], ANSWER[:2], asking)) == [()]
        assert propose(drafter, sequence([1, 2], ANSWER[:2], seen)) != [()]
    drafter = SuffixDrafter(CONFIG.model_copy(update={"suffix_tokens": 64}))
    drafter.forget(sequence([1, 2], ANSWER, "a"))
    drafter.forget(sequence([1, 2], list(range(100, 400)), "b"))
    assert propose(drafter, sequence([1, 2], ANSWER[:2], "a")) == [(13, 14, 15, 16)]


def test_old_outputs_and_old_salts_are_forgotten():
    drafter = SuffixDrafter(CONFIG.model_copy(update={"suffix_tokens": 64, "suffix_salts": 2}))
    drafter.forget(sequence([1], ANSWER, "a"))
    drafter.forget(sequence([1], list(range(100, 180)), "a"))
    assert propose(drafter, sequence([1], ANSWER[:2], "a")) == [()]
    assert propose(drafter, sequence([1], [177, 178], "a")) == [(179,)]
    running = sequence([1], ANSWER, "b")
    propose(drafter, running)
    for salt in ("c", "d"):
        drafter.forget(sequence([1], ANSWER, salt))
    assert propose(drafter, sequence([1], ANSWER[:2], "b")) == [()]
    running.output_token_ids.extend([17, 18, 19])
    assert propose(drafter, running, sequence([9], [17, 18], "b")) == [(), (19,)]


def test_an_ended_sequence_leaves_nothing_but_its_output():
    drafter = SuffixDrafter(CONFIG)
    seq = sequence([1, 2, 1, 2], ANSWER)
    propose(drafter, seq)
    drafter.forget(seq)
    drafter.forget(sequence([1], []))
    assert not drafter._known
