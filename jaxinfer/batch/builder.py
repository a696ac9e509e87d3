"""From a step plan to the arrays of the step: numpy only, padded to the buckets of the compile plan."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.packing import Packing
from jaxinfer.drafts import ancestor_words
from jaxinfer.request import Sequence
from jaxinfer.scheduler.plan import ScheduledRow, StepPlan


class Samples(NamedTuple):
    """What a step samples, in the order of the plan; a row with drafts has a sample behind its newest token and one
    behind each draft.

    Attributes:
        rows: row of each sample.
        tokens: int32, index in the batch of the token whose logits are sampled.
        positions: int32, position of the sampled token in its sequence.
        drafts: int32, the draft that is sampled behind, or -1.
        before: int32, the sample that must equal this draft, for this sample to count; -1: it always counts.
    """

    rows: tuple[ScheduledRow, ...]
    tokens: np.ndarray
    positions: np.ndarray
    drafts: np.ndarray
    before: np.ndarray


@dataclass(frozen=True)
class StepArrays:
    """Host data of a step.

    Attributes:
        packed: int32, a packed ``ForwardBatch`` of ``token_bucket`` tokens.
    """

    token_bucket: int
    packed: np.ndarray
    samples: Samples


class BatchBuilder:
    """Builds batches; mirrors the block tables of the batch slots, so a step only appends what is new."""

    def __init__(self, plan: CompilePlan) -> None:
        self._plan = plan
        self._packings = {t: Packing.make(plan, t) for t in plan.token_buckets}
        shape = (plan.max_num_seqs, plan.table_width)
        self._tables = [np.zeros(shape, np.int32) for _ in range(plan.num_groups)]
        self._mirrored = [[0] * plan.max_num_seqs for _ in range(plan.num_groups)]

    def build(self, step: StepPlan) -> StepArrays:
        rows = step.rows
        for seq in step.admitted:
            for mirror, mirrored in zip(self._tables, self._mirrored):
                mirror[seq.slot] = 0
                mirrored[seq.slot] = 0
        self._mirror([row.seq for row in rows])
        slots = np.array([row.seq.slot for row in rows])
        starts = np.array([row.start for row in rows])
        counts = np.array([row.num_tokens for row in rows])
        tokens = _tokens(rows)
        bucket = self._plan.tokens(len(tokens))
        packed = self._pack(bucket, tokens, slots, starts, counts)
        if self._plan.tree_words:
            self._add_trees(rows, counts, self._packings[bucket].views(packed))
        return StepArrays(bucket, packed, _samples(step, starts, counts))

    def empty(self, token_bucket: int) -> StepArrays:
        """A batch of padding only, for warm-up."""
        packed = np.zeros(self._packings[token_bucket].size, np.int32)
        none = np.zeros(0, np.int32)
        return StepArrays(token_bucket, packed, Samples((), none, none, none, none))

    def _mirror(self, seqs: list[Sequence]) -> None:
        """Copies new entries. Blocks that left the window keep their stale entries: nothing reads them."""
        for group, (mirror, mirrored) in enumerate(zip(self._tables, self._mirrored)):
            for seq in seqs:
                table, slot = seq.tables[group], seq.slot
                done = mirrored[slot]
                if len(table) > done:
                    mirror[slot, done : len(table)] = table[done:]
                    mirrored[slot] = len(table)

    def _add_trees(self, rows: tuple[ScheduledRow, ...], counts: np.ndarray, views: list[np.ndarray]) -> None:
        """Positions and masks of the drafts that do not just follow each other. They keep slots of their own."""
        positions_T, ancestors_TU = views[1], views[-1]
        for row, end in zip(rows, np.cumsum(counts).tolist()):
            if row.drafts.is_chain:
                continue
            first = end - len(row.drafts)
            assert row.num_tokens == 1 + len(row.drafts), "a tree follows one token"
            positions_T[first:end] = row.start + np.array(row.drafts.depths)
            ancestors_TU[first:end] = ancestor_words(row.drafts.parents, self._plan.tree_words)[1:]

    def _pack(
        self, bucket: int, tokens: list[int], slots: np.ndarray, starts: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        plan, packing = self._plan, self._packings[bucket]
        packed = np.zeros(packing.size, np.int32)
        token_ids, positions, query_start, context_len, *per_group = packing.views(packed)
        n, t = len(counts), len(tokens)
        token_ids[:t] = tokens
        ends = np.cumsum(counts)
        row_of_token = np.repeat(np.arange(n), counts)
        positions[:t] = np.arange(t) - (ends - counts)[row_of_token] + starts[row_of_token]
        query_start[1 : n + 1] = ends
        query_start[n + 1 :] = t
        context_len[:n] = starts + counts
        block, offset = np.divmod(positions[:t], plan.block_size)
        slot_of_token = slots[row_of_token]
        width = int(-(-int(context_len[:n].max()) // plan.block_size))
        for group, mirror in enumerate(self._tables):
            per_group[group][:n, :width] = mirror[slots, :width]
            per_group[plan.num_groups + group][:t] = mirror[slot_of_token, block] * plan.block_size + offset
        return packed


def _tokens(rows: tuple[ScheduledRow, ...]) -> list[int]:
    """Ids of the step's tokens; -(slot + 1) for the newest token of a sequence if the host does not know it yet."""
    tokens: list[int] = []
    for row in rows:
        seq, start = row.seq, row.start
        if start >= seq.num_prompt + len(seq.output_token_ids):
            assert row.num_tokens == 1, "only the newest token can be unknown"
            tokens.append(-1 - seq.slot)
        else:
            tokens += seq.token_ids(start, start + row.num_tokens - len(row.drafts.tokens))
            tokens += row.drafts.tokens
    return tokens


def _samples(step: StepPlan, starts: np.ndarray, counts: np.ndarray) -> Samples:
    sampled = np.flatnonzero([row.samples for row in step.rows])
    sampled_rows = step.rows
    if len(sampled) < len(sampled_rows):
        sampled_rows = tuple([step.rows[i] for i in sampled.tolist()])
    ends = (np.cumsum(counts) - 1)[sampled].astype(np.int32)
    positions = (starts + counts)[sampled].astype(np.int32)
    none = np.full(len(sampled), -1, np.int32)
    if not step.drafted:
        return Samples(sampled_rows, ends, positions, none, none)
    tokens: list[int] = []
    places: list[int] = []
    drafts: list[int] = []
    before: list[int] = []
    for row, end, position in zip(sampled_rows, ends.tolist(), positions.tolist()):
        count, first = len(row.drafts), len(drafts)
        tokens += range(end - count, end + 1)
        places += [position - count + depth for depth in (0, *row.drafts.depths)]
        drafts += (-1, *row.drafts.tokens)
        before += (-1, *(first + 1 + parent for parent in row.drafts.parents))
    return Samples(
        tuple(row for row in sampled_rows for _ in range(row.num_samples)),
        *(np.array(values, np.int32) for values in (tokens, places, drafts, before)),
    )
