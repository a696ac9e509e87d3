"""Single scheduling passes: budget, chunks, admission, choices of one request."""

import pytest

from jaxinfer.request import FinishReason, QueueFullError, RequestError, Status
from tests.support.scheduling import add, commit, counts, make, step
from tests.support.sequences import make_sequence

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


def test_more_choices_than_may_ever_wait_are_a_bad_request():
    s = make(max_waiting_seqs=2)
    with pytest.raises(RequestError, match="n is 3, but at most 2"):
        s.add([make_sequence([1], index=i) for i in range(3)])


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


def test_choices_do_not_copy_what_is_itself_copied_in_the_same_step():
    """A parent that comes back on a hit which covers its prompt waits for a copy; its sibling forks a step later."""
    s = make()
    cached = add(s, range(8), max_tokens=1)
    step(s)
    s.finish(cached, FinishReason.LENGTH)
    parent = make_sequence(range(6))
    parent.output_token_ids = [6, 99]
    child = make_sequence(range(6), index=1, parent=parent)
    s.add([parent, child])
    plan = step(s)
    assert list(counts(plan)) == [parent]
    assert plan.rows[0].start == 7
    assert [copy.target for copy in plan.copies] == [parent.tables[0][1]]
    plan = step(s)
    assert [row.seq for row in plan.rows] == [parent, child]
    assert [copy.source for copy in plan.copies] == [parent.tables[0][1]]
