"""What waits while another engine computes prompts, and what does not have to."""

import dataclasses

import msgspec
import pytest

from jaxinfer.engine.snapshots import take_snapshot
from jaxinfer.request import QueueFullError, Status
from tests.support.linked_engines import PROMPT, Pair, add, alone, pair, tokens

pytestmark = pytest.mark.feature("disaggregation")


def steps_alone(both: Pair, count: int = 20) -> list:
    """News of the decode engine while nothing comes from the other one."""
    news = []
    for _ in range(count):
        if both.decode.core.has_work:
            news += both.decode.core.step()
            both.check()
    return news


def test_a_prompt_that_is_here_does_not_wait_behind_fetches() -> None:
    both = pair(max_fetches=1)
    add(both, "first", PROMPT)
    both.settle()
    (fetched,) = add(both, "fetched", [3, *PROMPT])
    (queued,) = add(both, "queued", [4, *PROMPT])
    add(both, "here", PROMPT)
    assert tokens(steps_alone(both), "here") == alone(PROMPT)
    assert (fetched.status, queued.status) == (Status.FETCHING, Status.WAITING)
    news = both.settle()
    assert tokens(news, "fetched") == alone([3, *PROMPT])
    assert tokens(news, "queued") == alone([4, *PROMPT])
    assert len(both.link.asks) == 3
    both.assert_clean()


def test_choices_share_a_fetched_prompt_without_a_prefix_cache() -> None:
    both = pair(prefix_caching=False)
    add(both, "a", PROMPT, n=3, temperature=1.0, seed=1)
    both.settle()
    assert len(both.link.asks) == 1
    both.assert_clean()


@pytest.mark.parametrize("overlap", [0, 1])
def test_choices_share_a_prompt_that_was_computed_here_after_all(overlap: int) -> None:
    both = pair(overlap=overlap, chunk_size=None)
    add(both, "a", PROMPT, n=3)
    both.decode.core.step()
    both.link.fail(1)
    news = both.settle()
    assert tokens(news, "a")[:1] == alone(PROMPT, 1)
    assert len(both.link.asks) == 1
    both.assert_clean()


def test_an_ask_for_blocks_before_the_window_is_refused() -> None:
    """They are in no table if the prompt is in the prefix cache."""
    both = pair((8,))
    add(both, "a", PROMPT)
    both.settle()
    both.decode.core.scheduler.kv.reset_prefix_cache()
    add(both, "b", PROMPT)
    both.decode.core.step()
    asked = both.link.to_prefill.popleft()
    assert asked.ask.first == (3,)
    for first in (0, 2):
        ask = msgspec.structs.replace(asked.ask, first=(first,))
        both.link.prefiller.take(dataclasses.replace(asked, ask=ask))
        assert "allowed is [3] to 5" in both.link.to_decode.pop().error
        assert not both.prefill.core.scheduler.has_work
    both.link.to_prefill.append(asked)
    assert tokens(both.settle(), "b") == alone(PROMPT)
    both.assert_clean()


@pytest.mark.parametrize(
    ("limit", "message"),
    [({"max_waiting_seqs": 1}, "1 sequences are waiting"), ({"max_waiting_tokens": 30}, "23 prompt tokens")],
    ids=["sequences", "tokens"],
)
def test_sequences_that_are_fetched_count_as_waiting(limit, message) -> None:
    both = pair(**limit)
    core = both.decode.core
    (seq,) = add(both, "a", PROMPT)
    core.step()
    assert seq.status is Status.FETCHING
    snapshot = take_snapshot(core, both.decode.compilations)
    assert (snapshot.waiting, snapshot.fetching, snapshot.waiting_tokens) == (1, 1, len(PROMPT))
    with pytest.raises(QueueFullError, match=message):
        add(both, "b", [4, *PROMPT])
    both.settle()
    assert take_snapshot(core, both.decode.compilations).waiting_tokens == 0
    both.assert_clean()
