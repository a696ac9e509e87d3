"""The arrays of a step: positions, slots, tables, and tokens that the host does not know yet."""

from dataclasses import dataclass

import numpy as np
import pytest

from jaxinfer.batch.builder import BatchBuilder, StepArrays
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.packing import Packing
from jaxinfer.config import SchedulerConfig
from jaxinfer.request import Sequence
from jaxinfer.scheduler.plan import ScheduledRow, StepPlan
from tests.support.sequences import make_sequence

BLOCK = 4


@dataclass(frozen=True)
class Views:
    tokens: np.ndarray
    positions: np.ndarray
    query_start: np.ndarray
    context_len: np.ndarray
    tables: list[np.ndarray]
    slots: list[np.ndarray]


def make_plan(groups: int = 1) -> CompilePlan:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32)
    return CompilePlan.make(scheduler, 32, BLOCK, groups)


def views(plan: CompilePlan, arrays: StepArrays) -> Views:
    tokens, positions, starts, lengths, *rest = Packing.make(plan, arrays.token_bucket).views(arrays.packed)
    groups = plan.num_groups
    return Views(tokens, positions, starts, lengths, rest[:groups], rest[groups:])


def placed(prompt, slot: int, *tables: list[int]) -> Sequence:
    seq = make_sequence(prompt, num_groups=len(tables))
    seq.slot, seq.tables = slot, [list(table) for table in tables]
    return seq


def row(seq: Sequence, start: int, count: int, samples: bool = True) -> ScheduledRow:
    return ScheduledRow(seq, start, count, samples, seq.epoch, len(seq.output_token_ids) + seq.num_in_flight)


def step(*rows: ScheduledRow, admitted: tuple[Sequence, ...] = ()) -> StepPlan:
    return StepPlan(rows, admitted, (), 0)


def test_mixed_prefill_and_decode():
    plan = make_plan()
    a = placed([10, 11, 12, 13, 14], 0, [3, 7])
    b = placed([20, 21], 2, [5])
    b.output_token_ids = [22]
    arrays = BatchBuilder(plan).build(step(row(a, 0, 5, samples=False), row(b, 2, 1), admitted=(a, b)))
    v = views(plan, arrays)
    assert arrays.token_bucket == 8
    assert v.tokens.tolist() == [10, 11, 12, 13, 14, 22, 0, 0]
    assert v.positions.tolist() == [0, 1, 2, 3, 4, 2, 0, 0]
    assert v.query_start.tolist() == [0, 5, 6, 6, 6]
    assert v.context_len.tolist() == [5, 3, 0, 0]
    assert v.slots[0].tolist() == [12, 13, 14, 15, 28, 22, 0, 0]
    assert v.tables[0][0, :2].tolist() == [3, 7]
    assert v.tables[0][1, :1].tolist() == [5]
    assert [r.seq for r in arrays.samples.rows] == [b]
    assert arrays.samples.tokens.tolist() == [5]


def test_a_chunk_in_the_middle_of_a_prompt():
    plan = make_plan()
    a = placed(range(100, 112), 1, [2, 3, 4])
    arrays = BatchBuilder(plan).build(step(row(a, 4, 4, samples=False), admitted=(a,)))
    v = views(plan, arrays)
    assert v.tokens.tolist() == [104, 105, 106, 107]
    assert v.positions.tolist() == [4, 5, 6, 7]
    assert v.slots[0].tolist() == [12, 13, 14, 15]
    assert v.context_len[0] == 8
    assert len(arrays.samples.rows) == 0


def test_unknown_newest_tokens_are_named_by_their_batch_slot():
    plan = make_plan()
    builder = BatchBuilder(plan)
    a, b = placed([1, 2], 0, [1]), placed([3, 4, 5], 3, [2])
    builder.build(step(row(a, 0, 2), row(b, 0, 3), admitted=(a, b)))
    a.num_in_flight = b.num_in_flight = 1
    v = views(plan, builder.build(step(row(a, 2, 1), row(b, 3, 1))))
    assert v.tokens.tolist() == [-1, -4]
    assert v.positions.tolist() == [2, 3]


def test_padding_has_no_context_and_writes_to_block_0():
    """KVC-08: padded rows have no tokens, padded tokens write to block 0."""
    plan = make_plan(groups=2)
    a = placed(range(5), 0, [3, 7], [9, 8])
    v = views(plan, BatchBuilder(plan).build(step(row(a, 0, 5), admitted=(a,))))
    assert v.context_len[1:].tolist() == [0, 0, 0]
    assert v.query_start[1:].tolist() == [5, 5, 5, 5]
    for group in range(2):
        assert (v.slots[group][5:] < BLOCK).all()
        assert not v.tables[group][1:].any()


def test_kvc_08_an_empty_batch_touches_block_0_only():
    plan = make_plan()
    builder = BatchBuilder(plan)
    for bucket in plan.token_buckets:
        v = views(plan, builder.empty(bucket))
        assert not v.context_len.any()
        assert not v.query_start.any()
        assert not v.slots[0].any()


def test_unused_table_entries_are_zero_after_a_slot_changes_hands():
    """The table of a short sequence holds nothing of the long one that had its batch slot, and a neighbour's length
    does not bring it back."""
    plan = make_plan()
    builder = BatchBuilder(plan)
    old, neighbour = placed(range(16), 0, [1, 2, 3, 4]), placed(range(16), 1, [5, 6, 7, 8])
    builder.build(step(row(old, 0, 16), row(neighbour, 0, 16), admitted=(old, neighbour)))
    new = placed(range(3), 0, [9])
    v = views(plan, builder.build(step(row(new, 0, 3), row(neighbour, 15, 1), admitted=(new,))))
    assert v.tables[0][0].tolist() == [9] + [0] * (plan.table_width - 1)
    assert v.tables[0][1, :4].tolist() == [5, 6, 7, 8]


def test_tables_grow_with_the_sequence():
    plan = make_plan()
    builder = BatchBuilder(plan)
    a = placed(range(4), 0, [3])
    builder.build(step(row(a, 0, 4), admitted=(a,)))
    a.output_token_ids = [7]
    a.tables[0].append(11)
    v = views(plan, builder.build(step(row(a, 4, 1))))
    assert v.tables[0][0, :2].tolist() == [3, 11]
    assert v.slots[0][0] == 11 * BLOCK


def test_blocks_outside_a_window_may_be_stale_but_visible_ones_are_right():
    plan = make_plan(groups=2)
    builder = BatchBuilder(plan)
    a = placed(range(12), 0, [1, 2, 3], [4, 5, 6])
    builder.build(step(row(a, 0, 12), admitted=(a,)))
    a.output_token_ids = [7]
    a.tables[0].append(9)
    a.tables[1] = [0, 0, 6, 8]
    v = views(plan, builder.build(step(row(a, 12, 1))))
    assert v.tables[0][0, :4].tolist() == [1, 2, 3, 9]
    assert v.tables[1][0, 2:4].tolist() == [6, 8]
    assert v.slots[1][0] == 8 * BLOCK


@pytest.mark.parametrize("counts", [(1,), (2, 1), (1, 1, 1, 1), (9, 1, 3)])
def test_every_step_fits_its_bucket(counts):
    plan = make_plan()
    seqs = [placed(range(n), i, [3 * i + 1, 3 * i + 2, 3 * i + 3]) for i, n in enumerate(counts)]
    rows = [row(seq, 0, n) for seq, n in zip(seqs, counts)]
    arrays = BatchBuilder(plan).build(step(*rows, admitted=tuple(seqs)))
    assert arrays.token_bucket == plan.tokens(sum(counts))
    v = views(plan, arrays)
    assert v.query_start[len(counts)] == sum(counts)
    assert arrays.samples.tokens.tolist() == (np.cumsum(counts) - 1).tolist()
