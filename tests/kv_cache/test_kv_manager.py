"""Prefix hits, allocation and release."""

import pytest

from jaxinfer.kv_cache.manager import BlockCopy, KVCacheManager
from jaxinfer.sampling_params import SamplingParams
from tests.support.kv import BLOCK, compute, grow, manager, seq_of

# ---- hits


def test_a_hit_covers_full_blocks_and_a_part_of_the_next():
    kv = manager()
    a = seq_of(range(12), kv)
    compute(kv, a)
    b = seq_of([*range(10), 99, 98, 97], kv)
    hit = kv.find(b)
    assert hit.num_tokens == 10
    assert hit.tables == (tuple(a.tables[0][:2]),)
    copies = compute(kv, b)
    assert copies == [BlockCopy(0, a.tables[0][2], b.tables[0][2])]
    assert b.tables[0][:2] == a.tables[0][:2]
    assert b.tables[0][2] not in a.tables[0]
    kv.check_integrity([a, b])


@pytest.mark.parametrize(("length", "expected"), [(1, 0), (2, 1), (4, 3), (5, 4), (8, 7), (9, 8)])
def test_a_full_hit_recomputes_the_last_token(length, expected):
    kv = manager()
    compute(kv, seq_of(range(12), kv))
    assert kv.find(seq_of(range(length), kv)).num_tokens == expected


def test_outputs_are_found_too():
    kv = manager()
    a = seq_of(range(6), kv)
    compute(kv, a)
    for token in (50, 51, 52):
        grow(kv, a, token)
    follow_up = seq_of([*range(6), 50, 51, 60], kv)
    assert kv.find(follow_up).num_tokens == 8


def test_nothing_is_found_when_caching_is_off_or_not_read():
    kv = manager(caching=False)
    compute(kv, seq_of(range(8), kv))
    assert kv.find(seq_of(range(8), kv)).num_tokens == 0
    assert len(kv.cache) == 0
    kv = manager()
    compute(kv, seq_of(range(8), kv))
    skip = seq_of(range(8), kv, params=SamplingParams(prompt_logprobs=0))
    assert kv.find(skip).num_tokens == 0


def test_only_committed_blocks_are_filed():
    kv = manager()
    a = seq_of(range(12), kv)
    kv.admit(a, kv.find(a), 12, 12)
    a.num_computed = 12
    assert kv.find(seq_of(range(12), kv)).num_tokens == 0
    a.num_committed = 7
    kv.commit(a)
    assert kv.find(seq_of(range(12), kv)).num_tokens == 4


def test_kvc_03_salts_isolate_all_blocks():
    kv = manager(17)
    compute(kv, seq_of(range(12), kv, salt="s1"))
    assert kv.find(seq_of(range(12), kv, salt="s1")).num_tokens == 11
    assert kv.find(seq_of(range(12), kv, salt="s2")).num_tokens == 0
    assert kv.find(seq_of(range(12), kv)).num_tokens == 0


def test_a_salt_may_hold_what_utf_8_cannot():
    kv = manager(17)
    for salt in ("\ud800", "\udfff"):
        compute(kv, seq_of(range(8), kv, salt=salt))
        assert kv.find(seq_of(range(8), kv, salt=salt)).num_tokens == 7
    assert kv.find(seq_of(range(8), kv, salt="\ufffd")).num_tokens == 0


def test_reset_forgets_content_and_keeps_blocks_in_use():
    kv = manager()
    a = seq_of(range(8), kv)
    compute(kv, a)
    kv.reset_prefix_cache()
    assert kv.find(seq_of(range(8), kv)).num_tokens == 0
    kv.check_integrity([a])
    for token in range(50, 60):
        grow(kv, a, token)
    kv.check_integrity([a])
    kv.release(a)
    kv.check_integrity([])


# ---- allocation


def test_admission_is_all_or_nothing():
    kv = manager(5)
    a = seq_of(range(8), kv)
    compute(kv, a)
    before = kv.pools[0].free_order()
    b = seq_of(range(100, 112), kv)
    assert kv.admit(b, kv.find(b), 12, 12) is None
    assert kv.pools[0].free_order() == before
    assert b.tables == [[]]
    kv.check_integrity([a])


def test_admission_asks_for_the_whole_prompt_and_allocates_the_first_chunk():
    kv = manager(5)
    a = seq_of(range(12), kv)
    assert kv.admit(a, kv.find(a), 4, 20) is None
    assert kv.admit(a, kv.find(a), 4, 12) == []
    assert len(a.tables[0]) == 1


def test_kvc_05_hit_blocks_in_the_free_queue_are_not_new_blocks():
    """6 blocks, c1 and c2 cached and the oldest in the queue; the new request needs them and 2 others."""
    for others, fits in ((2, True), (1, False)):
        kv = manager(7)
        r3 = seq_of(range(200, 200 + 4 * (4 - others)), kv)
        r1, r4 = seq_of(range(8), kv), seq_of(range(100, 100 + 4 * others), kv)
        for seq in (r3, r1, r4):
            compute(kv, seq)
        hits = list(r1.tables[0])
        kv.release(r1)
        kv.release(r4)
        assert kv.pools[0].num_free == 2 + others
        r2 = seq_of([*range(8), *range(300, 307)], kv)
        before, references = kv.pools[0].free_order(), [kv.pools[0].references(b) for b in range(7)]
        for _ in range(1 if fits else 100):
            hit = kv.find(r2)
            assert hit.tables[0] == tuple(hits)
            done = kv.admit(r2, hit, 15, 15)
            assert (done is not None) == fits
        if fits:
            assert r2.tables[0][:2] == hits
            assert len(set(r2.tables[0])) == 4
            kv.check_integrity([r2, r3])
        else:
            assert kv.pools[0].free_order() == before
            assert [kv.pools[0].references(b) for b in range(7)] == references
            kv.release(r3)
            assert kv.admit(r2, kv.find(r2), 15, 15) is not None
            assert r2.tables[0][:2] == hits
        for seq in (r2, r3):
            kv.release(seq)
        kv.check_integrity([])
        assert kv.pools[0].num_free == 6


def test_the_source_of_a_partial_hit_may_be_the_new_block_itself():
    """The queue has only the block to copy from: it is taken, and its content stays where it is."""
    kv = manager(3)
    a = seq_of(range(8), kv)
    compute(kv, a)
    kv.release(a)
    b = seq_of([0, 1, 2, 9], kv)
    keep = seq_of([0, 1, 2, 3, 4, 5], kv)
    copies = compute(kv, keep)
    assert copies[0].source == copies[0].target
    assert kv.find(b).num_tokens == 3
    kv.check_integrity([keep])


def test_extend_is_all_or_nothing_over_groups():
    kv = KVCacheManager((9, 3), BLOCK, (None, 8), True)
    a = seq_of(range(8), kv)
    kv.admit(a, kv.find(a), 8, 8)
    before = [pool.free_order() for pool in kv.pools]
    assert not kv.extend(a, 9)
    assert [pool.free_order() for pool in kv.pools] == before
    kv.check_integrity([a])


# ---- release


def test_the_end_of_a_chain_is_reused_before_its_beginning():
    kv = manager(4)
    a = seq_of(range(12), kv)
    compute(kv, a)
    table = list(a.tables[0])
    kv.release(a)
    assert kv.pools[0].free_order() == tuple(reversed(table))
    compute(kv, seq_of([100], kv))
    assert kv.find(seq_of(range(12), kv)).num_tokens == 8


def test_blocks_without_cached_content_are_reused_first():
    kv = manager(6)
    a = seq_of(range(6), kv)
    compute(kv, a)
    full, partial = a.tables[0]
    kv.release(a)
    assert kv.pools[0].free_order()[0] == partial
    assert kv.pools[0].free_order()[-1] == full


def test_a_reused_block_loses_its_content():
    kv = manager(3)
    a = seq_of(range(8), kv)
    compute(kv, a)
    kv.release(a)
    b = seq_of(range(100, 108), kv)
    compute(kv, b)
    assert kv.find(seq_of(range(8), kv)).num_tokens == 0
    kv.check_integrity([b])


def test_usage_counts_blocks_of_sequences_only():
    kv = manager(9)
    assert kv.usage == 0
    a = seq_of(range(8), kv)
    compute(kv, a)
    assert kv.usage == pytest.approx(2 / 8)
    kv.release(a)
    assert kv.usage == 0


def test_forget_takes_everything_of_a_sequence_out_of_the_cache():
    kv = manager()
    a = seq_of(range(12), kv)
    compute(kv, a)
    kv.forget(a)
    assert kv.find(seq_of(range(12), kv)).num_tokens == 0
    kv.release(a)
    kv.check_integrity([])


def test_forget_reaches_blocks_that_the_sequence_gave_back():
    """After a preemption, and outside a sliding window, its blocks are not in its tables any more."""
    kv = manager()
    a = seq_of(range(12), kv)
    compute(kv, a)
    kv.release(a)
    kv.forget(a)
    assert kv.find(seq_of(range(12), kv)).num_tokens == 0
    kv = manager(windows=(4,))
    a = seq_of(range(12), kv)
    compute(kv, a)
    assert a.tables[0][0] == 0
    kv.forget(a)
    assert len(kv.cache) == 0
