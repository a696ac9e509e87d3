"""Scenarios that a random search rarely meets, on shadow memory."""

from dataclasses import replace

import pytest

from jaxinfer.sampling_params import SamplingParams
from tests.support import engines
from tests.support.scenarios import EOS, Ask, Scenario, play, verify

GREEDY = SamplingParams(temperature=0, ignore_eos=True, logprobs=0, detokenize=False)
PROMPT = (1, 2, 3, 4, 0, 1)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("generated", range(1, 8))
def test_choice_forks_from_a_parent_that_comes_back_in_the_same_pass(overlap: int, generated: int) -> None:
    """The parent returns with a block that is itself still to be copied; its choice must not copy from that block.

    Choice 0 loses its place to an urgent request while choice 1 still waits for a slot; then both slots become
    free in one pass. The prompt ends inside a block that a third request with the same text has filed.
    """
    settings = engines.config(max_num_seqs=2, policy="priority", overlap=overlap)
    last = 20
    asks = (
        Ask(PROMPT, replace(GREEDY, max_tokens=last), at=0),
        Ask(PROMPT, replace(GREEDY, max_tokens=9, n=2), at=0, priority=1),
        Ask((EOS,) * 3, replace(GREEDY, max_tokens=last - generated), at=generated),
    )
    scenario = Scenario(settings, (None,), asks)
    record = play(scenario)
    assert record.sequences[1, 0].preemptions == 1
    verify(scenario, record)


@pytest.mark.parametrize("again", range(2, 7))
@pytest.mark.parametrize("overlap", [0, 1])
def test_budget_that_comes_back_is_not_more_than_the_blocks_are_for(overlap: int, again: int) -> None:
    """An urgent request takes the budget of one prefill and the slot of another, as the first may not yield twice.
    What is left over of both budgets goes to the first, which has blocks for the tokens that it was planned with."""
    settings = engines.config(
        block_size=1,
        num_blocks=100,
        max_num_seqs=2,
        max_num_batched_tokens=12,
        chunk_size=8,
        policy="priority",
        max_preemptions=1,
        overlap=overlap,
    )
    long = tuple(i % 5 for i in range(36))
    short = replace(GREEDY, max_tokens=1)
    asks = (
        Ask(long, short, at=0, priority=2),
        Ask(long[::-1], short, at=0, priority=3),
        Ask((1, 1), short, at=1),
        Ask((2, 2), short, at=again),
    )
    scenario = Scenario(settings, (None,), asks)
    verify(scenario, play(scenario))
