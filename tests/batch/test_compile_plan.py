"""Shape buckets of the compile plan."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.packing import Packing
from jaxinfer.config import SchedulerConfig


def _plan(tokens: int = 64, seqs: int = 8, length: int = 64, groups: int = 1) -> CompilePlan:
    scheduler = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    return CompilePlan.make(scheduler, length, 4, groups)


@pytest.mark.parametrize("largest", [1, 2, 3, 5, 31, 32, 48, 64, 100, 512])
def test_buckets_cover_every_count_up_to_the_largest(largest):
    plan = _plan(tokens=largest, seqs=1)
    assert plan.token_buckets[-1] == max(largest, 2)
    assert list(plan.token_buckets) == sorted(set(plan.token_buckets))
    for count in range(1, largest + 1):
        bucket = plan.tokens(count)
        assert bucket >= count
        assert bucket <= max(2 * count, 2)


def test_halfway_buckets_from_32_on():
    assert _plan(tokens=128, seqs=1).token_buckets == (2, 4, 8, 16, 32, 48, 64, 96, 128)


def test_one_sequence_still_has_two_rows():
    plan = _plan(seqs=1)
    assert plan.row_buckets == (2,)
    assert plan.rows(1) == 2
    assert plan.table_rows(64) == 2


def test_table_rows_never_fall_short_of_the_sequences_of_a_step():
    plan = _plan(tokens=64, seqs=8)
    for count in range(1, 65):
        assert plan.table_rows(plan.tokens(count)) >= min(count, 8)


def test_table_width_covers_the_context():
    assert _plan(length=64).table_width == 16
    assert _plan(length=65).table_width == 17


def test_number_of_programs_adds_up():
    plan = _plan(tokens=16, seqs=4)
    backbones, samplers = len(plan.token_buckets), len(plan.row_buckets)
    heads = len({*plan.row_buckets, plan.scored_rows})
    assert plan.num_programs == backbones + samplers + heads + 3


def test_packing_views_are_disjoint_and_cover_the_vector():

    plan = _plan(tokens=16, seqs=4, groups=2)
    packing = Packing.make(plan, 8)
    packed = np.zeros(packing.size, np.int32)
    for i, view in enumerate(packing.views(packed), start=1):
        assert not view.any()
        view[...] = i
    assert packed.all()


def test_unpacked_batch_equals_the_views():

    plan = _plan(tokens=16, seqs=4, groups=2)
    packing = Packing.make(plan, 8)
    packed = np.arange(packing.size, dtype=np.int32)
    views = packing.views(packed)
    batch = packing.unpack(jnp.asarray(packed))
    unpacked = [
        batch.token_ids_T,
        batch.positions_T,
        batch.query_start_Q,
        batch.context_len_R,
        *batch.block_tables,
        *batch.slots,
    ]
    assert len(views) == len(unpacked)
    for view, array in zip(views, unpacked):
        np.testing.assert_array_equal(view, array)
