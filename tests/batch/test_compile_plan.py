"""Shape buckets of the compile plan."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.packing import Packing
from jaxinfer.config import SchedulerConfig


def _plan(
    tokens: int = 64, seqs: int = 8, length: int = 64, groups: int = 1, min_tokens: int = 1
) -> CompilePlan:
    scheduler = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    return CompilePlan.make(scheduler, length, 4, groups, min_tokens)


@pytest.mark.parametrize("min_tokens", [1, 2])
@pytest.mark.parametrize("largest", [1, 2, 3, 5, 31, 32, 48, 64, 100, 512])
def test_buckets_cover_every_count_up_to_the_largest(largest, min_tokens):
    plan = _plan(tokens=largest, seqs=1, min_tokens=min_tokens)
    assert plan.token_buckets[-1] == max(largest, min_tokens)
    assert plan.token_buckets[0] >= min_tokens
    assert list(plan.token_buckets) == sorted(set(plan.token_buckets))
    for count in range(1, largest + 1):
        assert count <= plan.tokens(count) <= max(2 * count, min_tokens)


@pytest.mark.parametrize("seqs", [1, 2, 7, 8, 9, 64, 100])
def test_row_buckets_cover_every_number_of_sequences(seqs):
    plan = _plan(tokens=128, seqs=seqs)
    assert plan.row_buckets[-1] == seqs
    for count in range(1, seqs + 1):
        assert plan.rows(count) >= count


def test_halfway_buckets_from_32_on():
    assert _plan(tokens=128, seqs=1, min_tokens=2).token_buckets == (2, 4, 8, 16, 32, 48, 64, 96, 128)


def test_padding_to_two_rows_where_one_is_slow():
    plan = _plan(seqs=1, min_tokens=2)
    assert plan.row_buckets == (2,)
    assert plan.rows(1) == plan.tokens(1) == plan.table_rows(64) == 2


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
    assert plan.num_programs == backbones + samplers + heads + 4


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
