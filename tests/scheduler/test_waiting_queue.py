"""Order of waiting sequences."""

import random

from jaxinfer.scheduler.queue import WaitingQueue
from tests.support.sequences import make_sequence


def test_arrival_order_ignores_priority():
    queue = WaitingQueue(by_priority=False)
    a, b, c = make_sequence([1], priority=5), make_sequence([1], priority=0), make_sequence([1], priority=9)
    for seq in (c, a, b):
        queue.add(seq)
    assert list(queue) == [a, b, c]


def test_priority_first_then_arrival():
    queue = WaitingQueue(by_priority=True)
    a, b, c = make_sequence([1], priority=5), make_sequence([1], priority=0), make_sequence([1], priority=5)
    for seq in (c, b, a):
        queue.add(seq)
    assert list(queue) == [b, a, c]


def test_a_sequence_that_comes_back_is_not_passed_by_later_ones():
    queue = WaitingQueue(by_priority=False)
    first, second, third = (make_sequence([1]) for _ in range(3))
    queue.add(second)
    queue.add(third)
    queue.add(first)
    assert list(queue) == [first, second, third]


def test_removal_and_token_count():
    rng = random.Random(0)
    for by_priority in (False, True):
        queue = WaitingQueue(by_priority)
        seqs = [make_sequence(range(rng.randrange(1, 9)), priority=rng.randrange(3)) for _ in range(50)]
        for seq in rng.sample(seqs, len(seqs)):
            queue.add(seq)
        assert queue.num_prompt_tokens == sum(seq.num_prompt for seq in seqs)
        assert [queue.key(seq) for seq in queue] == sorted(queue.key(seq) for seq in seqs)
        for seq in rng.sample(seqs, len(seqs)):
            queue.remove(seq)
            assert seq not in list(queue)
        assert len(queue) == 0
        assert queue.num_prompt_tokens == 0
