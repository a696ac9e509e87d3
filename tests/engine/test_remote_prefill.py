"""Prompts that another engine computes: two engines in one thread, on shadow memory that checks every read."""

import dataclasses
import random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.request import QueueFullError, RequestError, Status
from tests.support.engines import assert_clean, config
from tests.support.linked_engines import PROMPT, Pair, add, alone, computed, pair, tokens, trouble
from tests.support.scenarios import Ask, Scenario, ask_of, expected, settings_of
from tests.support.shadow_runner import ShadowModel

pytestmark = pytest.mark.feature("disaggregation")


def test_the_tokens_are_those_of_one_engine_and_only_missing_blocks_travel() -> None:
    both = pair()
    add(both, "a", PROMPT)
    news = both.settle()
    assert tokens(news, "a") == alone(PROMPT)
    both.assert_clean()
    # All tokens but the last one, in 5 full blocks and half of one; the decode engine computes that one and the answer.
    assert sum(b.stop - b.start for b in both.link.sent) == 6
    assert (computed(both.prefill), computed(both.decode)) == (22, 1 + 4)
    # Chunks of 8 tokens are sent as they are computed.
    assert [(b.start, b.stop, b.unused) for b in both.link.sent] == [(0, 2, 0), (2, 4, 0), (4, 6, 2)]


def test_prefix_hits_count_on_both_sides() -> None:
    both = pair()
    add(both, "a", PROMPT)
    both.settle()
    both.link.sent.clear()
    longer = [*PROMPT[:20], *[4] * 16]
    add(both, "b", longer)
    assert tokens(both.settle(), "b") == alone(longer)
    # 5 blocks are here and 4 come; the prefill engine had 5 as well.
    assert [(b.start, b.stop) for b in both.link.sent] == [(5, 7), (7, 9)]
    assert both.link.asks[-1].first == (5,)
    assert computed(both.prefill) == 22 + 15
    add(both, "c", longer)  # everything is here
    assert tokens(both.settle(), "c") == alone(longer)
    assert len(both.link.asks) == 2
    both.assert_clean()


def test_blocks_that_only_the_prefill_engine_has_are_sent_at_once() -> None:
    both = pair()
    add(both, "a", PROMPT)
    both.settle()
    both.decode.core.scheduler.kv.reset_prefix_cache()
    both.link.sent.clear()
    add(both, "b", PROMPT)
    assert tokens(both.settle(), "b") == alone(PROMPT)
    assert sum(b.stop - b.start for b in both.link.sent) == 6
    assert computed(both.prefill) == 22 + 2  # what is in no full block


@pytest.mark.parametrize("windows", [(8,), (None, 6), (4, None, 12)], ids=str)
def test_layers_with_a_window_get_what_they_can_see(windows) -> None:
    both = pair(windows)
    add(both, "a", PROMPT)
    assert tokens(both.settle(), "a") == alone(PROMPT)
    wanted = {g: sum(b.stop - b.start for b in both.link.sent if b.group == g) for g in range(len(windows))}
    for group, window in enumerate(windows):
        first = 0 if window is None else (22 - window + 1) // 4
        assert wanted[group] == 6 - first
    both.assert_clean()


def test_blocks_that_are_on_their_way_are_not_fetched_twice() -> None:
    both = pair()
    add(both, "a", PROMPT)
    add(both, "b", [*PROMPT, 1, 1])
    news = both.settle()
    assert tokens(news, "a") == alone(PROMPT)
    assert tokens(news, "b") == alone([*PROMPT, 1, 1])
    assert [ask.first for ask in both.link.asks] == [(0,), (5,)]
    assert sum(b.stop - b.start for b in both.link.sent) == 6 + 1
    both.assert_clean()


def test_others_run_while_blocks_are_on_their_way() -> None:
    both = pair()
    add(both, "short", PROMPT[:3], max_tokens=20)
    core = both.decode.core
    news = core.step()
    (long,) = add(both, "long", PROMPT)
    news += core.step()
    assert long.status is Status.FETCHING
    assert any(long.tables)
    later = [*core.step(), *core.step()]
    assert tokens(later, "short")
    assert tokens(news + later + both.settle(), "long") == alone(PROMPT)
    both.assert_clean()


def test_an_engine_that_only_waits_for_blocks_has_no_work_until_they_come() -> None:
    both = pair()
    add(both, "a", PROMPT)
    both.decode.core.step()
    assert not both.decode.core.has_work
    both.link.deliver()
    while both.prefill.core.has_work:
        both.prefill.core.step()
    both.link.deliver()
    assert both.decode.core.has_work
    both.settle()
    both.assert_clean()


def test_steps_with_running_decodes_stay_short_while_long_prompts_arrive() -> None:
    """A step of the decode engine computes the last token of each prompt beside decodes, wherever its blocks end."""
    both = pair(num_blocks=64, chunk_size=None, max_num_batched_tokens=32, max_num_seqs=4)
    add(both, "running", PROMPT[:3], max_tokens=40)
    both.decode.core.step()
    largest = 0
    for i in range(4):
        add(both, str(i), [i, *PROMPT, *PROMPT[: 9 + i]], max_tokens=1)  # 33 tokens and more, 8 full blocks
        for _ in range(8):
            both.link.deliver()
            if both.prefill.core.has_work:
                both.prefill.core.step()
            before = computed(both.decode)
            both.decode.core.step()
            both.check()
            largest = max(largest, computed(both.decode) - before)
    assert largest == 2
    both.settle()
    both.assert_clean()
    assert both.decode.core.stats.requests_finished.total() == 5


@pytest.mark.parametrize("at", range(5))
def test_a_lost_peer_is_made_up_for(at) -> None:
    both = pair()
    add(both, "a", PROMPT)
    news = both.decode.core.step()
    for _ in range(at):
        both.link.deliver()
        both.prefill.core.step()
    both.link.lose_prefill()
    both.link.lose_decode()
    news += both.settle()
    assert tokens(news, "a") == alone(PROMPT)
    both.assert_clean()
    assert computed(both.decode) == len(PROMPT) + 4
    add(both, "b", list(reversed(PROMPT)))  # nobody is asked any more
    assert tokens(both.settle(), "b") == alone(list(reversed(PROMPT)))
    assert len(both.link.asks) == 1


@pytest.mark.parametrize("at", range(6))
def test_an_abort_frees_everything_on_both_sides(at) -> None:
    both = pair()
    add(both, "a", PROMPT)
    both.decode.core.step()
    for _ in range(at):
        both.link.deliver()
        both.prefill.core.step()
    both.decode.core.abort("a")
    both.settle()
    both.assert_clean()


def test_blocks_that_come_for_an_aborted_sequence_are_dropped() -> None:
    both = pair(num_blocks=8)
    add(both, "a", PROMPT)
    both.decode.core.step()
    both.link.deliver()
    while both.prefill.core.has_work:
        both.prefill.core.step()
    both.decode.core.abort("a")
    other = [3] * 11
    add(both, "b", other, skip_reading_prefix_cache=True)  # takes the blocks, and computes itself
    news = both.decode.core.step()
    news += both.settle()
    assert tokens(news, "b") == alone(other)
    both.assert_clean()


def test_logits_that_are_not_finite_end_nothing_but_the_fetch() -> None:
    both = pair(model=ShadowModel(sick=lambda name, index, position: name.startswith("kv ")))
    add(both, "a", PROMPT)
    assert tokens(both.settle(), "a") == alone(PROMPT)
    assert computed(both.decode) == len(PROMPT) + 4
    both.assert_clean()


def test_what_needs_every_position_is_computed_here() -> None:
    both = pair()
    add(both, "a", PROMPT, prompt_logprobs=0)
    add(both, "b", PROMPT, skip_reading_prefix_cache=True)
    add(both, "c", PROMPT[:4])
    both.settle()
    assert not both.link.asks


def test_choices_share_a_prompt_that_came() -> None:
    both = pair()
    add(both, "a", PROMPT, n=3, temperature=1.0, seed=1)
    both.settle()
    assert sum(b.stop - b.start for b in both.link.sent) == 6
    both.assert_clean()


def test_a_fetch_holds_no_blocks_that_more_urgent_sequences_need() -> None:
    """The fetch never ends, and the sequence before it grows beyond what is free."""
    both = pair(num_blocks=11)
    add(both, "old", PROMPT[:3], max_tokens=30)
    core = both.decode.core
    news = core.step()
    add(both, "new", PROMPT)
    both.link.up = True
    for _ in range(45):
        if core.has_work:
            news += core.step()
            core.check_integrity()
    assert tokens(news, "old") == alone(PROMPT[:3], 30)
    assert core.scheduler.fetches.fetching  # it has started anew
    news += both.settle()
    assert tokens(news, "new") == alone(PROMPT)
    both.assert_clean()


def test_an_ask_that_is_not_valid_is_answered_with_the_reason() -> None:
    both = pair()
    add(both, "a", PROMPT)
    both.decode.core.step()
    asked = both.link.to_prefill.popleft()
    wrong = [
        msgspec.structs.replace(asked.ask, token_ids=()),
        msgspec.structs.replace(asked.ask, first=(9,)),
        msgspec.structs.replace(asked.ask, first=(0, 0)),
        msgspec.structs.replace(asked.ask, digest=b"x" * 16),
        msgspec.structs.replace(asked.ask, token_ids=(99,) * 20),
        msgspec.structs.replace(asked.ask, token_ids=(1,) * 400),
    ]
    for ask in wrong:
        both.link.prefiller.take(dataclasses.replace(asked, ask=ask))
        assert both.link.to_decode.pop().error
        assert not both.prefill.core.scheduler.has_work
    both.link.to_prefill.append(asked)
    assert tokens(both.settle(), "a") == alone(PROMPT)
    assert_clean(both.prefill)


QUIET: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@settings(max_examples=40, **QUIET)
@given(
    settings_of(),
    settings_of(),
    st.sampled_from([(None,), (None,), (None, 4), (5,), (1, 6)]),
    st.lists(ask_of(), min_size=1, max_size=8),
    st.integers(0, 10**6),
)
def test_every_request_is_answered_whatever_happens_between_the_engines(
    here, there, windows, asks: list[Ask], seed
) -> None:
    """Random arrivals, losses, timeouts and aborts: tokens are those of a sequence alone, and nothing leaks."""
    rng = random.Random(seed)
    there = there.model_copy(
        update={"cache": there.cache.model_copy(update={"block_size": here.cache.block_size})}
    )
    asks = [Ask(a.prompt, a.params, a.at, a.priority, a.salt, a.abort_at) for a in asks]
    both = Pair(here, ShadowModel(), others=there, windows=windows, max_fetches=rng.choice([1, 2, 8]))
    core = both.decode.core
    sequences: dict[tuple[int, int], Any] = {}
    got: dict[tuple[int, int], list[int]] = {}
    ends: dict[tuple[int, int], str] = {}
    for step in range(3000):
        for i, ask in enumerate(asks):
            if ask.at == step:
                prompt = {"prompt_token_ids": ask.prompt} | ({"cache_salt": ask.salt} if ask.salt else {})
                try:
                    made = both.decode.inputs.process(str(i), prompt, ask.params, ask.priority)
                    core.add(made)
                except (QueueFullError, RequestError):
                    continue
                sequences |= {(i, seq.index): seq for seq in made}
            if ask.abort_at == step:
                core.abort(str(i))
        if step < 60:
            trouble(rng, both.link)
            both.link.deliver(rng.randint(0, 3))
        else:
            both.link.deliver()
        if both.prefill.core.has_work and (step > 60 or rng.random() < 0.7):
            both.prefill.core.step()
        for delta in core.step() if core.has_work else []:
            key = (int(delta.request_id), delta.index)
            got.setdefault(key, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                ends[key] = delta.finish_reason.value
        both.check()
        if step > 60 and both.idle:
            break
    else:
        raise AssertionError("the requests did not end")
    both.assert_clean()
    assert set(ends) == set(sequences)
    for key, seq in sequences.items():
        want, reason = _expected(asks[key[0]], seq)
        if ends[key] == "abort":
            assert got.get(key, []) == want[: len(got.get(key, []))]
        else:
            assert (got.get(key, []), ends[key]) == (want, reason)


def _expected(ask: Ask, seq) -> tuple[list[int], str]:
    renamed = Scenario(config(), (None,), (ask,) * (int(seq.request.request_id) + 1))
    want, reason = expected(renamed, seq)
    return want, reason.value
