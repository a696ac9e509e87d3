"""Single scheduling passes: budget, chunks, admission, preemption inside a pass."""

import pytest

from jaxinfer.config import SchedulerConfig
from jaxinfer.kv_cache.manager import KVCacheManager
from jaxinfer.request import FinishReason, QueueFullError, Sequence, Status
from jaxinfer.scheduler.plan import StepPlan
from jaxinfer.scheduler.scheduler import Scheduler
from tests.support.sequences import make_sequence

BLOCK = 4


def make(num_blocks: int = 33, *, windows=(None,), caching: bool = True, **options) -> Scheduler:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 16, **options}
    kv = KVCacheManager((num_blocks,) * len(windows), BLOCK, windows, caching)
    return Scheduler(SchedulerConfig(**values), kv)


def add(scheduler: Scheduler, prompt, **options) -> Sequence:
    seq = make_sequence(prompt, **options)
    scheduler.add([seq])
    return seq


def commit(scheduler: Scheduler, plan: StepPlan | None, token: int = 7) -> None:
    """What the core does with the results of a step."""
    assert plan is not None
    for row in plan.rows:
        row.seq.num_in_flight -= row.samples
        if row.seq.status is not Status.FINISHED:
            scheduler.commit(row)
            if row.samples:
                row.seq.output_token_ids.append(token)


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    commit(scheduler, plan)
    scheduler.check_integrity()
    assert plan is not None
    return plan


def counts(plan: StepPlan | None) -> dict[Sequence, int]:
    assert plan is not None
    return {row.seq: row.num_tokens for row in plan.rows}


# ---- budget and chunks


def test_prefill_in_chunks_under_the_budget():
    s = make(max_num_batched_tokens=6)
    a, b = add(s, range(10)), add(s, range(100, 104))
    plan = step(s)
    assert counts(plan) == {a: 6}
    assert not plan.rows[0].samples
    plan = step(s)
    assert counts(plan) == {a: 4, b: 2}
    assert [row.samples for row in plan.rows] == [True, False]
    assert counts(step(s)) == {a: 1, b: 2}


def test_the_chunk_size_limits_each_sequence_but_not_decodes():
    s = make(chunk_size=4)
    a, b = add(s, range(10)), add(s, range(100, 103))
    assert counts(step(s)) == {a: 4, b: 3}
    assert counts(step(s)) == {a: 4, b: 1}
    assert counts(step(s)) == {a: 2, b: 1}


def test_overlap_plans_the_next_token_before_the_last_is_known():
    s = make()
    a = add(s, range(4))
    first = s.schedule()
    second = s.schedule()
    assert counts(first) == {a: 4}
    assert counts(second) == {a: 1}
    assert a.num_in_flight == 2
    assert a.num_tokens == 6
    commit(s, first)
    commit(s, second)
    assert a.num_tokens == 6
    assert a.num_committed == 5


def test_no_token_is_computed_beyond_max_tokens():
    s = make()
    a = add(s, range(4), max_tokens=2)
    s.schedule()
    s.schedule()
    assert s.schedule() is None
    assert a.num_in_flight == 2


def test_a_request_that_only_scores_samples_nothing():
    s = make(chunk_size=4)
    a = add(s, range(6), max_tokens=0)
    plans = [s.schedule(), s.schedule()]
    assert [row.samples for plan in plans if plan for row in plan.rows] == [False, False]
    assert s.schedule() is None
    assert a.num_in_flight == 0


def test_masks_from_history_wait_for_the_token_in_flight():
    s = make()
    a = add(s, range(4))
    a.host_masked = True
    first = s.schedule()
    assert s.schedule() is None
    commit(s, first)
    assert counts(s.schedule()) == {a: 1}


def test_nothing_to_do():
    assert make().schedule() is None


# ---- admission


def test_batch_slots_limit_the_running_sequences():
    s = make(max_num_seqs=2)
    seqs = [add(s, range(10 * i, 10 * i + 3)) for i in range(3)]
    assert set(counts(step(s))) == set(seqs[:2])
    s.finish(seqs[0], FinishReason.STOP)
    assert set(counts(step(s))) == set(seqs[1:])
    assert sorted(seq.slot for seq in s.running) == [0, 1]


def test_nobody_passes_a_sequence_that_waits_for_blocks():
    s = make(num_blocks=6)
    big, waiting, small = add(s, range(12)), add(s, range(100, 112)), add(s, range(200, 202))
    assert set(counts(step(s))) == {big}
    assert set(counts(step(s))) == {big}
    s.finish(big, FinishReason.STOP)
    assert set(counts(step(s))) == {waiting, small}


def test_the_limit_on_waiting_sequences():
    s = make(max_waiting_seqs=2)
    add(s, range(3))
    with pytest.raises(QueueFullError, match="limit is 2"):
        s.add([make_sequence(range(3)), make_sequence(range(3))])
    assert len(s.waiting) == 1
    add(s, range(3))
    with pytest.raises(QueueFullError):
        add(s, range(3))
    step(s)
    add(s, range(3))


def test_the_limit_on_waiting_tokens():
    """A request longer than the limit is admitted when nothing waits, so it is not refused for ever."""
    s = make(max_waiting_tokens=10)
    add(s, range(12))
    with pytest.raises(QueueFullError, match="12 prompt tokens"):
        add(s, range(3))
    step(s)
    add(s, range(7))
    with pytest.raises(QueueFullError):
        add(s, range(4))
    add(s, range(3))


def test_finish_in_every_state_and_twice():
    s = make(max_num_seqs=1)
    running, waiting = add(s, range(3)), add(s, range(3))
    step(s)
    for seq in (waiting, running, running):
        s.finish(seq, FinishReason.ABORT)
        assert seq.status is Status.FINISHED
        s.check_integrity()
    assert not s.has_work
    assert s.kv.pools[0].num_free == s.kv.pools[0].num_usable


# ---- preemption


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


# ---- choices of one request


def test_choices_wait_for_the_prompt_and_share_its_blocks():
    s = make(chunk_size=4)
    parent = make_sequence(range(6))
    children = [make_sequence(range(6), index=i, parent=parent) for i in (1, 2)]
    s.add([parent, *children])
    assert counts(step(s)) == {parent: 4}
    assert counts(step(s)) == {parent: 2}
    plan = step(s)
    assert counts(plan) == {parent: 1, children[0]: 1, children[1]: 1}
    full = parent.tables[0][0]
    assert [seq.tables[0][0] for seq in children] == [full, full]
    assert s.kv.pools[0].references(full) == 3
    partial = {seq.tables[0][1] for seq in (parent, *children)}
    assert len(partial) == 3
    assert {(c.source, c.target) for c in plan.copies} == {
        (parent.tables[0][1], child.tables[0][1]) for child in children
    }
    assert [row.start for row in plan.rows[1:]] == [5, 5]


def test_choices_start_alone_when_the_parent_is_gone():
    s = make(caching=False)
    parent = make_sequence(range(6))
    child = make_sequence(range(6), index=1, parent=parent)
    s.add([parent, child])
    s.finish(parent, FinishReason.ABORT)
    assert counts(step(s)) == {child: 6}


def test_choices_of_one_token_prompts():
    s = make()
    parent = make_sequence([5])
    child = make_sequence([5], index=1, parent=parent)
    s.add([parent, child])
    assert counts(step(s)) == {parent: 1}
    assert counts(step(s)) == {parent: 1, child: 1}
