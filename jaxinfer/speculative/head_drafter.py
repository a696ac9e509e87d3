"""Drafts by a trained head that reads the target's hidden states: Medusa, EAGLE, EAGLE-3."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch.builder import BatchBuilder, StepArrays
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.drafts import Drafts
from jaxinfer.kv_cache.manager import SlotMove
from jaxinfer.request import Sequence as Seq
from jaxinfer.request import Status
from jaxinfer.runner.device_sampler import DeviceSampler
from jaxinfer.runner.follower import TargetStep
from jaxinfer.scheduler.plan import ScheduledRow, StepPlan
from jaxinfer.speculative.constrained import ConstrainedPaths
from jaxinfer.speculative.drafter import DraftJob
from jaxinfer.speculative.head_entries import Before, HeadEntries, LoadedHead
from jaxinfer.speculative.head_trees import TreeDrafting
from jaxinfer.speculative.heads.programs import capture
from jaxinfer.speculative.trees.cartesian import CartesianTree, best_choices
from jaxinfer.speculative.trees.dynamic import TreeShape, top

MEDUSA_RANKS = 8
"""Guesses of each Medusa head that a tree is made of."""

_capture = jax.jit(capture, static_argnums=2, donate_argnums=0)
_top = jax.jit(partial(top, count=MEDUSA_RANKS))


@dataclass(frozen=True)
class _Place:
    """A row with drafts, and where its tokens are in the step that was followed last."""

    row: ScheduledRow
    first: int


class HeadDrafter:
    """A ``Follower`` that keeps the target's features, and a ``Drafter`` that draws from a head on them.

    The head's K and V lie in pools of its own, but in the blocks of the target's tables. Entry i is a function of
    tokens up to i (see ``DraftHead``), so entries of shared and cached blocks hold for whoever reads them. Entries of
    drafts are computed from the head's own outputs first, and again from the target's features when it verifies them.
    The first token behind a prefix hit gets zeros for a feature, since the one before it was not computed.

    EAGLE's chains are drawn as ``DraftModel`` draws them; its trees are EAGLE-2's (``TreeDrafting``). Medusa's drafts
    are the best guesses of the heads, as a chain or as the most probable tree.

    Args:
        sampler: the target's; it knows the requests' parameters.
        num_layers, hidden_size: of the target.
        dtype: of the activations.
        trees: how trees grow; None: drafts are chains.
    """

    def __init__(
        self,
        loaded: LoadedHead,
        plan: CompilePlan,
        builder: BatchBuilder,
        sampler: DeviceSampler,
        *,
        num_layers: int,
        hidden_size: int,
        dtype: jnp.dtype,
        trees: TreeShape | None,
    ) -> None:
        self._head, self._functions, self._leaves = loaded.head, loaded.functions, loaded.leaves
        self._entries = HeadEntries(loaded, plan, hidden_size, dtype)
        self._growth = None
        if trees is not None and self._head.forward is not None:
            self._growth = TreeDrafting(self._entries, plan, builder, trees)
        self._plan, self._builder, self._sampler = plan, builder, sampler
        self._num_layers, self._trees = num_layers, trees
        X, W = plan.token_buckets[-1], plan.max_num_seqs + 1
        self._captured_XF = jnp.zeros((X, len(self._head.feature_layers) * hidden_size), dtype)
        self._x_XD = jnp.zeros((X, hidden_size), dtype)
        self._zeros_XD = jnp.zeros((X, hidden_size), dtype)
        self._feature_WD, self._own_WD = (jnp.zeros((W, hidden_size), dtype) for _ in range(2))
        self._newest_W = jnp.zeros(W, jnp.int32)
        self._unverified: list[_Place] = []

    # ---- Follower

    def capture(self, layer: int, x_TD: jax.Array) -> None:
        if layer in self._head.feature_layers:
            column = self._head.feature_layers.index(layer) * x_TD.shape[1]
            self._captured_XF = _capture(self._captured_XF, x_TD, column)

    def follow(self, step: TargetStep) -> None:
        """Keeps the features of a step, and computes its entries."""
        plan, T = step.plan, step.arrays.token_bucket
        self.capture(self._num_layers, step.hidden_XD)
        self._settle()
        self._entries.copy(plan.copies)
        if plan.admitted:
            # Nothing is known before the first token that is computed: at its position the feature is zero.
            self._keep([(seq.slot, 0) for seq in plan.admitted], self._zeros_XD)
        self._read_features(step.hidden_XD, T)
        if self._head.forward is not None:
            self._compute(step.arrays, plan.rows, step.newest_W, self._feature_WD, self._x_XD)
        first = 0
        newest = []
        for row in plan.rows:
            if row.drafts:
                self._unverified.append(_Place(row, first))
            else:
                newest.append((row.seq.slot, first + row.num_tokens - 1))
            first += row.num_tokens
        self._keep(newest, self._x_XD)

    def move(self, moves: Sequence[SlotMove]) -> None:
        self._entries.move(moves)

    def warm_ups(self, builder: BatchBuilder) -> list[Callable[[], object]]:
        plan = self._plan

        def follow(bucket: int) -> None:
            for layer in self._head.feature_layers:
                self.capture(layer, self._zeros_XD[:bucket])
            self._read_features(self._zeros_XD, bucket)
            if self._head.forward is not None:
                self._compute(builder.empty(bucket), (), self._newest_W, self._feature_WD, self._x_XD)

        def draw(bucket: int) -> None:
            index_P = np.zeros(bucket, np.int32)
            if self._head.forward is None:
                _top(self._functions.logits(self._leaves, self._feature_WD, index_P))
            else:
                _, self._newest_W = self._sampler.warm_draw(
                    bucket, self._entries.logits(index_P), self._newest_W
                )

        rows = [bucket for bucket in plan.row_buckets if bucket <= plan.rows(plan.max_num_seqs)]
        return [
            *(partial(follow, bucket) for bucket in plan.token_buckets),
            lambda: self._store([], self._zeros_XD),
            *(partial(draw, bucket) for bucket in ([] if self._growth else rows)),
            *(self._growth.warm_ups(builder) if self._growth else ()),
            *self._entries.warm_ups(),
        ]

    # ---- Drafter

    @property
    def slots(self) -> int:
        return 0 if self._growth is None or self._trees is None else self._trees.expanded

    def propose(self, jobs: Sequence[DraftJob]) -> list[Drafts]:
        self._settle()
        if self._head.forward is None:
            return self._at_once(jobs)
        if self._growth is not None:
            return self._growth.propose(jobs, self._feature_WD)
        return self._one_by_one(jobs)

    def forget(self, seq: Seq) -> None:
        """Features are kept by batch slot: whoever gets the slot starts anew."""

    # ---- parts

    def _at_once(self, jobs: Sequence[DraftJob]) -> list[Drafts]:
        """Medusa: all positions from the feature behind which the newest token was sampled."""
        slots_P = np.full(self._plan.rows(len(jobs)), self._plan.max_num_seqs, np.int32)
        slots_P[: len(jobs)] = [job.seq.slot for job in jobs]
        token_PKX, logprob_PKX = map(
            np.asarray, _top(self._functions.logits(self._leaves, self._feature_WD, slots_P))
        )
        return [self._product(job, token_PKX[i], np.exp(logprob_PKX[i])) for i, job in enumerate(jobs)]

    def _product(self, job: DraftJob, token_KX: np.ndarray, probability_KX: np.ndarray) -> Drafts:
        depth = min(job.depth, len(token_KX))
        if self._trees is None:
            return Drafts.chain(token_KX[: min(depth, job.limit), 0].tolist())
        return CartesianTree.make(best_choices(probability_KX[:depth], job.limit)).fill(token_KX)

    def _one_by_one(self, jobs: Sequence[DraftJob]) -> list[Drafts]:
        """EAGLE: each draft is an entry, whose output stands for the feature of the next one."""
        steps = []
        feature_WD = self._feature_WD
        paths = ConstrainedPaths(jobs)
        for depth in range(max(job.limit for job in jobs)):
            rows = [_row(job.seq, depth) for job in jobs if job.limit > depth and not paths.ends(job.seq)]
            if not rows:
                break
            sequences = [row.seq for row in rows]
            masks = paths.masks(sequences)
            arrays = self._builder.build(StepPlan(tuple(rows), (), (), 0))
            self._compute(arrays, tuple(rows), self._newest_W, feature_WD, self._zeros_XD)
            tokens_P, self._newest_W = self._sampler.draw(arrays, self._entries.logits, self._newest_W, masks)
            if masks:  # the next masks depend on these tokens
                paths.accept(sequences, np.asarray(tokens_P).tolist())
            pairs = [(row.seq.slot, index) for index, row in enumerate(rows)]
            self._own_WD = feature_WD = self._functions.keep(
                self._own_WD, self._entries.hidden_XD, *self._padded(pairs)
            )
            steps.append((sequences, tokens_P))
        drafts: dict[Seq, list[int]] = {job.seq: [] for job in jobs}
        for sequences, tokens_P in steps:  # the first fetch waits for the device, after all is dispatched
            for seq, token in zip(sequences, np.asarray(tokens_P).tolist()):
                drafts[seq].append(token)
        return [Drafts.chain(drafts[job.seq]) for job in jobs]

    def _settle(self) -> None:
        """Keeps the feature before the newest token of sequences whose drafts are verified by now."""
        pairs = []
        for row, first in ((place.row, place.first) for place in self._unverified):
            seq = row.seq
            if seq.status is Status.RUNNING and seq.epoch == row.epoch:
                plain = row.num_tokens - len(row.drafts)
                path = row.drafts.along(seq.token_ids(row.start + plain, seq.num_computed))
                pairs.append((seq.slot, first + plain - 1 + (1 + path[-1] if path else 0)))
        self._unverified = []
        self._keep(pairs, self._x_XD)

    def _keep(self, pairs: list[tuple[int, int]], x_XD: jax.Array) -> None:
        """Keeps rows of x for slots; pairs of a slot and a row."""
        if pairs:
            self._store(pairs, x_XD)

    def _store(self, pairs: list[tuple[int, int]], x_XD: jax.Array) -> None:
        self._feature_WD = self._functions.keep(self._feature_WD, x_XD, *self._padded(pairs))

    def _padded(self, pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Slots and indices of ``HeadFunctions.keep``."""
        slot_R = np.full(self._plan.max_num_seqs, self._plan.max_num_seqs, np.int32)
        index_R = np.zeros(self._plan.max_num_seqs, np.int32)
        for i, (slot, index) in enumerate(pairs):
            slot_R[i], index_R[i] = slot, index
        return slot_R, index_R

    def _read_features(self, hidden_XD: jax.Array, T: int) -> None:
        self._x_XD = self._functions.features(self._x_XD, self._leaves, hidden_XD, self._captured_XF, T)

    def _compute(
        self,
        arrays: StepArrays,
        rows: Sequence[ScheduledRow],
        newest_W: jax.Array,
        feature_WD: jax.Array,
        x_XD: jax.Array,
    ) -> None:
        """Computes the entries of a batch."""
        T = arrays.token_bucket
        before = Before.of(rows, T, self._plan.max_num_seqs)
        self._entries.compute(arrays.packed, T, before, newest_W, feature_WD, x_XD)


def _row(seq: Seq, depth: int) -> ScheduledRow:
    """The entry of the newest token, or of a draft behind it."""
    return ScheduledRow(seq, seq.num_tokens - 1 + depth, 1, True, seq.epoch, len(seq.output_token_ids))
