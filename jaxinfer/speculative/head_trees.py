"""EAGLE-2 in the engine: a head grows a tree for each sequence, level by level, without the host knowing its tokens.

A level is one pass of the head over rows that hold the newest token and *all* nodes so far: attention has masks for the
tokens of a row only. The nodes stand in slots behind the sequence, in its own blocks, at the positions of their depths;
whatever is computed there is computed again, from the target's features, by the step that verifies drafts. So nothing
that was committed changes. A head has one layer or few, so the nodes that are computed again cost little.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch.builder import BatchBuilder
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.drafts import ROOT, Drafts
from jaxinfer.scheduler.plan import ScheduledRow, StepPlan
from jaxinfer.speculative.drafter import DraftJob
from jaxinfer.speculative.head_entries import Before, HeadEntries
from jaxinfer.speculative.heads.tree_programs import best_of, fill_nodes, grow_trees
from jaxinfer.speculative.trees.dynamic import Reranked, TreeShape, nothing_grown, trees_of


class TreeDrafting:
    """Trees of drafts by an autoregressive head.

    Args:
        plan: one for trees, whose largest step holds the tokens of one tree that grows.
    """

    def __init__(
        self, entries: HeadEntries, plan: CompilePlan, builder: BatchBuilder, shape: TreeShape
    ) -> None:
        assert plan.token_buckets[-1] > shape.expanded, "the configuration was checked"
        self._entries, self._plan, self._builder, self._shape = entries, plan, builder, shape
        self._size = min(plan.max_drafts, shape.candidates)
        self._seed = nothing_grown(plan.max_num_seqs, shape, plan.tree_words)
        self._no_tokens_W = jnp.zeros(plan.max_num_seqs + 1, jnp.int32)
        # Parents are not known to the host; any node of the level before gives the right depth.
        self._guess = Drafts(
            (0,) * shape.expanded,
            tuple(
                (n // shape.width - 1) * shape.width if n >= shape.width else ROOT
                for n in range(shape.expanded)
            ),
        )

    def propose(self, jobs: Sequence[DraftJob], feature_WD: jax.Array) -> list[Drafts]:
        """A tree for each job, at most ``limit`` drafts of it.

        Args:
            feature_WD: what the target's step gave before the newest token, by batch slot.
        """
        pending = [(group, self._grow(group, feature_WD)) for group in self._groups(jobs)]
        # The first fetch waits for the device, after all is dispatched.
        return [tree for group, reranked in pending for tree in trees_of(reranked)[: len(group)]]

    def warm_ups(self, builder: BatchBuilder) -> list[Callable[[], object]]:
        """One call per program, on padding; those of the head's passes not among them."""
        plan, spare = self._plan, self._plan.max_num_seqs * self._shape.width
        zeros_W = np.zeros(plan.max_num_seqs, np.int32)

        def grow(bucket: int) -> None:
            logits_PV = self._entries.logits(np.zeros(bucket, np.int32))
            place_P = np.full(bucket, spare, np.int32)
            grow_trees(self._seed, logits_PV, place_P, np.int32(0), width=self._shape.width)

        def fill(bucket: int) -> None:
            none_T = np.full(bucket, -1, np.int32)
            packed = builder.empty(bucket).packed
            rows_T = np.zeros(bucket, np.int32)
            fill_nodes(self._seed, packed, rows_T, none_T, zeros_W, plan=plan, token_bucket=bucket)

        return [
            *(partial(grow, bucket) for bucket in plan.row_buckets),
            *(partial(fill, bucket) for bucket in plan.token_buckets),
            lambda: best_of(self._seed, zeros_W, size=self._size),
        ]

    # ---- parts

    def _groups(self, jobs: Sequence[DraftJob]) -> Iterator[list[DraftJob]]:
        """As many jobs at once as fit a step, in tokens, sampled rows and rows."""
        plan, shape = self._plan, self._shape
        most = min(
            plan.token_buckets[-1] // (1 + shape.expanded),
            plan.row_buckets[-1] // shape.width,
            plan.max_num_seqs,
        )
        for first in range(0, len(jobs), most):
            yield list(jobs[first : first + most])

    def _levels(self, job: DraftJob) -> int:
        """Levels that fit the positions and the slots behind a sequence."""
        return min(self._shape.depth, job.depth, 1 + job.slots // self._shape.width)

    def _grow(self, group: list[DraftJob], feature_WD: jax.Array) -> Reranked:
        growing, first_W = self._seed, np.zeros(self._plan.max_num_seqs, np.int32)
        for level in range(max(map(self._levels, group))):
            members = [i for i, job in enumerate(group) if self._levels(job) > level]
            nodes = level * self._shape.width
            rows = [self._row(group[i], nodes) for i in members]
            arrays = self._builder.build(StepPlan(tuple(rows), (), (), 0))
            before = Before.of(rows, arrays.token_bucket, self._plan.max_num_seqs)
            packed: np.ndarray | jax.Array = arrays.packed
            if level:
                row_T, node_T = _places(members, nodes, arrays.token_bucket)
                packed, before_T = fill_nodes(
                    growing,
                    arrays.packed,
                    row_T,
                    node_T,
                    first_W,
                    plan=self._plan,
                    token_bucket=arrays.token_bucket,
                )
                before = Before(before_T, before.slot_T)
            self._entries.compute(
                packed,
                arrays.token_bucket,
                before,
                self._no_tokens_W,
                feature_WD,
                self._entries.hidden_XD,
            )
            first_W = np.zeros(self._plan.max_num_seqs, np.int32)
            first_W[members] = np.arange(len(members)) * (1 + nodes)
            index_P, place_P = self._last_nodes(members, first_W, level)
            growing = grow_trees(
                growing,
                self._entries.logits(index_P),
                place_P,
                np.int32(level),
                width=self._shape.width,
            )
        limit_W = np.zeros(self._plan.max_num_seqs, np.int32)
        limit_W[: len(group)] = [job.limit for job in group]
        return best_of(growing, limit_W, size=self._size)

    def _row(self, job: DraftJob, nodes: int) -> ScheduledRow:
        """The newest token of a sequence and its nodes."""
        seq = job.seq
        return ScheduledRow(
            seq,
            seq.num_tokens - 1,
            1 + nodes,
            True,
            seq.epoch,
            len(seq.output_token_ids),
            self._guess.first(nodes),
        )

    def _last_nodes(
        self, members: list[int], first_W: np.ndarray, level: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where the nodes of the last level are in the batch, and their places in ``grow_trees``."""
        width = self._shape.width
        chosen = np.arange(width if level else 1)
        offset = chosen + (1 + (level - 1) * width if level else 0)
        index = (first_W[members][:, None] + offset).reshape(-1)
        place = (np.array(members)[:, None] * width + chosen).reshape(-1)
        bucket = self._plan.rows(len(index))
        index_P = np.zeros(bucket, np.int32)
        place_P = np.full(bucket, self._plan.max_num_seqs * width, np.int32)
        index_P[: len(index)], place_P[: len(index)] = index, place
        return index_P, place_P


def _places(members: list[int], nodes: int, token_bucket: int) -> tuple[np.ndarray, np.ndarray]:
    """Tree and node of each token; -1 for those that are no nodes."""
    row_T, node_T = np.zeros(token_bucket, np.int32), np.full(token_bucket, -1, np.int32)
    count = len(members) * (1 + nodes)
    row_T[:count] = np.repeat(members, 1 + nodes)
    node_T[:count] = np.tile(np.arange(-1, nodes), len(members))
    return row_T, node_T
