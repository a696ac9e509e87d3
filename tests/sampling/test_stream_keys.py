"""Keys of random streams: what a sequence's tokens may and may not depend on."""

import numpy as np
import pytest
from sampling_cases import SLOTS, Row, decode

from jaxinfer.sampling.keys import stream_key
from jaxinfer.sampling.state import init_state

VOCAB = 320
A, B = [97], [98]


def run(keys: list[tuple[int, int]], temperature: float = 1.0, start: int = 1) -> list[list[int]]:
    """16 tokens per key from all-zero logits, in one batch."""
    rows = [Row(temperature=temperature, key=key, position=start) for key in keys]
    return decode(np.zeros((len(keys), VOCAB), np.float32), rows, init_state(SLOTS, VOCAB), 16, 8)[0]


def test_smp_02_choices_and_prompts_have_their_own_streams() -> None:
    """Pinned: n=1 with a seed equals choice 0 of n>1; equal prompts with equal seeds give equal text."""
    four = run([stream_key(7, A, i) for i in range(4)])
    assert len({tuple(tokens) for tokens in four}) == 4
    assert run([stream_key(7, A, i) for i in range(4)]) == four
    a, b = run([stream_key(7, A, 0), stream_key(7, B, 0)])
    assert a != b
    assert run([stream_key(7, B, 0), stream_key(7, A, 0)]) == [b, a]
    assert run([stream_key(7, A, 0)]) == [four[0]]
    greedy = run([stream_key(7, A, i) for i in range(4)], temperature=0.0)
    assert greedy == [[0] * 16] * 4


def test_smp_03_no_seed_is_fresh_entropy_per_sequence() -> None:
    batch = run([stream_key(None, A, 0) for _ in range(4)])
    later = run([stream_key(None, A, i) for i in range(3)])
    assert len({tuple(tokens) for tokens in batch + later}) == 7
    assert stream_key(0, A, 0) == stream_key(0, A, 0)
    assert stream_key(0, A, 0) != stream_key(None, A, 0)


def test_streams_continue_by_position() -> None:
    """Splitting a generation, as a preemption does, changes nothing."""
    key = stream_key(3, A, 0)
    whole = run([key], start=1)
    assert run([key], start=5)[0][:12] == whole[0][4:]


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 1, 2**63 - 1])
def test_every_64_bit_seed_counts(seed: int) -> None:
    keys = {stream_key(s, A, 0) for s in (-(2**63), -1, 0, 1, 2**63 - 1, seed)}
    assert len(keys) == 5
    assert all(0 <= word < 2**32 for word in stream_key(seed, A, 0))


def test_keys_are_the_same_on_every_machine() -> None:
    assert stream_key(7, [1, 2], 0) == (2423675267, 3958327836)
