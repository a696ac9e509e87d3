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
        assert "allowed is [3] to 6" in both.link.to_decode.pop().error
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


def count_lookups(both: Pair) -> list[str]:
    """Names of the requests that the decode engine looks up in its prefix cache, from now on."""
    kv, names = both.decode.core.scheduler.kv, []
    find = kv.find

    def counted(seq):
        names.append(seq.request.request_id)
        return find(seq)

    kv.find = counted  # type: ignore[method-assign]
    return names


def test_a_queue_behind_full_fetches_is_looked_up_once() -> None:
    both = pair(max_fetches=1, num_blocks=200)
    names = count_lookups(both)
    for i in range(20):
        add(both, str(i), [i % 5, i // 5, *PROMPT])
    add(both, "running", [1, 2], max_tokens=40)
    assert steps_alone(both)
    assert len(names) == 21
    names.clear()
    for _ in range(200):
        both.link.deliver()
        both.prefill.core.step()
        both.decode.core.step()
        if len(both.link.asks) == 5:
            break
    # Each fetch that ended: one look-up of the next, one of its own to be admitted.
    assert len(both.link.asks) == 5
    assert len(names) <= 8
    both.settle()
    both.assert_clean()


def test_a_queue_that_waits_for_the_same_blocks_is_looked_up_when_they_are_there() -> None:
    both = pair(max_fetches=2)
    names = count_lookups(both)
    prompts = {str(i): [*PROMPT[:20], i] for i in range(8)}
    for name, prompt in prompts.items():
        add(both, name, prompt, max_tokens=2)
    add(both, "other", [4, *PROMPT])
    add(both, "running", [1, 2], max_tokens=40)
    assert steps_alone(both)
    assert len(names) == 10
    assert len(both.link.asks) == 2
    for prompt, ask in zip((PROMPT[:20], [4, *PROMPT[:22]]), both.link.asks):
        assert list(ask.token_ids) == prompt
    news = both.settle()
    for name, prompt in prompts.items():
        assert tokens(news, name) == alone(prompt, 2)
    assert len(both.link.asks) == 2
    both.assert_clean()


def test_blocks_that_came_for_another_sequence_need_no_free_fetch() -> None:
    both = pair(max_fetches=1)
    add(both, "first", PROMPT)
    add(both, "other", [4, *PROMPT])
    add(both, "same", PROMPT)
    steps_alone(both, 2)
    both.link.deliver()
    while both.prefill.core.has_work:
        both.prefill.core.step()
    for _ in range(2):
        both.link.deliver()
    assert tokens(steps_alone(both), "same") == alone(PROMPT)
    assert len(both.link.asks) == 2
    both.settle()
    both.assert_clean()


@pytest.mark.parametrize(
    ("running", "seconds", "expected"),
    [(True, 0.0, [2, 2, 1, 1, 1, 1, 1, 1, 1]), (True, 1.0, [11]), (False, 0.0, [11])],
    ids=["no time left", "time enough", "nobody runs"],
)
def test_pieces_that_come_at_once_are_spread_over_steps(running, seconds, expected) -> None:
    """At least one a step, and an eighth of those that wait, while others run.

    Args:
        seconds: between two steps; writes take none.
    """
    both = pair(num_blocks=100, chunk_size=4, max_num_batched_tokens=8)
    remote = both.decode.core.remote
    assert remote is not None
    now, written = 0.0, []
    remote._clock = lambda: now
    write = remote._writer.write_blocks

    def counted(*args) -> None:
        written[-1] += 1
        write(*args)

    remote._writer.write_blocks = counted  # type: ignore[method-assign]
    if running:
        add(both, "running", [1, 2], max_tokens=40)
        steps_alone(both, 2)
    prompt = [*PROMPT, *PROMPT[:19]]
    add(both, "long", prompt)
    both.decode.core.step()
    both.link.deliver()
    while both.prefill.core.has_work:
        both.prefill.core.step()
    both.link.deliver()
    news = []
    while sum(written) < 11:
        now += seconds
        written.append(0)
        news += both.decode.core.step()
        both.check()
    assert written == expected
    assert tokens(news + both.settle(), "long") == alone(prompt)
    both.assert_clean()
