"""Preemption inside scheduling passes: by memory, and in favour of more urgent sequences."""

import pytest

from jaxinfer.request import FinishReason, Status
from tests.support.scheduling import add, commit, counts, make, step


def test_the_least_urgent_sequence_loses_its_blocks():
    s = make(num_blocks=5)
    a, b = add(s, range(8)), add(s, range(100, 108))
    assert set(counts(step(s))) == {a, b}
    plan = step(s)
    assert counts(plan) == {a: 1}
    assert plan.preempted == 1
    assert b.status is Status.WAITING
    assert (b.num_computed, b.slot, b.tables) == (0, -1, [[]])
    assert b.output_token_ids == [7]
    s.finish(a, FinishReason.STOP)
    plan = step(s)
    assert plan.rows[0].seq is b
    assert plan.rows[0].start + plan.rows[0].num_tokens == 9


def test_a_preempted_sequence_waits_for_its_token_in_flight():
    s = make(num_blocks=5)
    a, b = add(s, range(8)), add(s, range(100, 108))
    first = s.schedule()
    second = s.schedule()
    assert set(counts(second)) == {a}
    assert b.num_in_flight == 1
    s.finish(a, FinishReason.ABORT)
    assert s.schedule() is None, "its newest token is not known"
    commit(s, first)
    assert b.num_committed == 0, "the blocks of the old epoch are gone"
    assert b.output_token_ids == [7]
    assert set(counts(s.schedule())) == {b}


def test_preemptions_of_a_pass_without_a_plan_are_reported_later():
    s = make(num_blocks=5)
    a, b = add(s, range(8), max_tokens=1), add(s, range(100, 108))
    first = s.schedule()
    assert s.schedule() is None, "A has what it wanted, and B lost its blocks"
    assert b.preemptions == 1
    commit(s, first)
    s.finish(a, FinishReason.LENGTH)
    plan = s.schedule()
    assert plan is not None
    assert plan.preempted == 1


def test_sch_04_preemption_takes_back_what_the_pass_gave():
    """Running A (priority 5) is planned first, then an urgent request takes its slot in the same pass."""
    s = make(max_num_seqs=1, policy="priority")
    a = add(s, range(6), priority=5)
    step(s)
    b = add(s, range(100, 104), priority=0)
    plan = step(s)
    assert counts(plan) == {b: 4}
    assert plan.admitted == (b,)
    assert plan.preempted == 1
    assert list(s.waiting) == [a]


@pytest.mark.parametrize("victims", [1, 2, 3])
def test_sch_04_victims_in_chunked_prefill_and_decode(victims):
    """Every victim was planned in this pass; the most urgent request needs all blocks."""
    s = make(num_blocks=10, policy="priority", chunk_size=4)
    low = [add(s, range(20 * i, 20 * i + 12), priority=5) for i in range(victims)]
    step(s)
    urgent = add(s, range(300, 300 + 36), priority=0)
    plan = s.schedule()
    s.check_integrity()
    planned = counts(plan)
    assert planned == {urgent: 4}
    assert plan is not None
    assert plan.num_tokens == sum(planned.values()) <= s.config.max_num_batched_tokens
    assert plan.preempted == victims
    assert sorted(s.waiting, key=lambda q: q.order) == low
    tables = [block for seq in s.running for block in seq.tables[0]]
    assert len(tables) == len(set(tables))


def test_sch_04_a_sequence_admitted_in_the_same_pass_gives_its_slot_back():
    """It was admitted, then a running and more urgent one needs its block: it has no plan, copy or slot left."""
    s = make(num_blocks=7, max_num_seqs=2, policy="priority")
    a = add(s, range(8), priority=0)
    step(s)
    b = add(s, range(100, 112), priority=5)
    plan = step(s)
    assert counts(plan) == {a: 1, b: 12}
    for _ in range(3):
        step(s)
    plan = step(s)
    assert counts(plan) == {a: 1}
    assert plan.admitted == ()
    assert list(s.waiting) == [b]


def test_equal_priority_never_preempts_for_a_slot():
    s = make(max_num_seqs=1, policy="priority")
    a = add(s, range(6), priority=5)
    step(s)
    add(s, range(100, 104), priority=5)
    assert counts(step(s)) == {a: 1}


def test_fcfs_ignores_priority():
    s = make(max_num_seqs=1)
    a = add(s, range(6), priority=5)
    step(s)
    add(s, range(100, 104), priority=0)
    assert counts(step(s)) == {a: 1}


def test_a_sequence_yields_at_most_max_preemptions_times():
    s = make(max_num_seqs=1, policy="priority", max_preemptions=2)
    a = add(s, range(3), priority=5)
    for _ in range(2):
        step(s)
        urgent = add(s, range(100, 103), priority=0)
        assert counts(step(s)) == {urgent: 3}
        s.finish(urgent, FinishReason.STOP)
    assert set(counts(step(s))) == {a}
    add(s, range(100, 103), priority=0)
    for _ in range(5):
        assert counts(step(s)) == {a: 1}
    assert a.preemptions == 2


def test_sch_05_an_urgent_request_gets_budget_from_a_long_prefill():
    """A less urgent prefill that fills every step gives way in the step after the arrival, and keeps its blocks."""
    s = make(policy="priority", max_num_batched_tokens=4)
    low = add(s, range(100, 130), priority=5)
    assert list(counts(step(s)).values()) == [4]
    urgent = add(s, range(6), priority=0)
    plan = step(s)
    assert (plan.rows[0].seq, plan.rows[0].num_tokens, len(plan.rows)) == (urgent, 4, 1)
    plan = step(s)
    assert [(row.seq is urgent, row.num_tokens) for row in plan.rows] == [(True, 2), (False, 2)]
    assert low.preemptions == 0


def test_sch_05_budget_that_an_urgent_request_does_not_need_goes_back():
    s = make(policy="priority", max_num_batched_tokens=4)
    low = add(s, range(100, 130), priority=5)
    step(s)
    urgent = add(s, range(3), priority=0)
    plan = step(s)
    assert {row.seq.order: row.num_tokens for row in plan.rows} == {urgent.order: 3, low.order: 1}
    assert low.num_computed == 5


def test_sch_05_an_urgent_request_gets_budget_and_slot_from_decodes():
    """Budget and batch slots are used up by decodes of less urgent sequences."""
    s = make(policy="priority", max_num_batched_tokens=4, max_num_seqs=4)
    low = [add(s, [10 * i + 1], priority=5) for i in range(4)]
    step(s)
    urgent = add(s, range(100, 110), priority=0)
    steps = 0
    while not urgent.output_token_ids:
        step(s)
        steps += 1
    assert steps <= 4
    assert [seq.preemptions for seq in low] == [0, 0, 0, 1]


def test_requests_of_equal_priority_do_not_take_budget():
    s = make(policy="priority", max_num_batched_tokens=4)
    low = add(s, range(100, 130), priority=5)
    step(s)
    add(s, range(6), priority=5)
    assert counts(step(s)) == {low: 4}
