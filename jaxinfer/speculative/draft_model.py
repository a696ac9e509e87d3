"""Drafts by a smaller model of the same vocabulary (Leviathan et al. 2023, arXiv:2211.17192)."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch.builder import BatchBuilder, StepArrays
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.kv_cache.layout import KVCache
from jaxinfer.kv_cache.manager import BlockCopy, SlotMove
from jaxinfer.request import Sequence as Seq
from jaxinfer.runner.block_copies import copy_blocks
from jaxinfer.runner.device_sampler import DeviceSampler
from jaxinfer.runner.follower import TargetStep
from jaxinfer.runner.programs import ModelPrograms
from jaxinfer.scheduler.plan import ScheduledRow, StepPlan
from jaxinfer.speculative.constrained import ConstrainedPaths
from jaxinfer.speculative.drafter import DraftJob
from jaxinfer.speculative.progress import DraftProgress


class DraftModel:
    """A ``Drafter`` that decodes a few tokens with a model of its own, and a ``Follower`` of the target.

    Its K and V lie in pools of its own, but in the blocks of the target's block tables: whatever happens to blocks
    (prefix hits, forks, preemption, release) happens to both models. Prompts are computed beside the target's chunks.
    What is missing before a draft (tokens of steps that had no drafts, and accepted ones) is computed with its first
    token.

    Each draft is drawn from the draft model's processed law by the random number that the target will use at that
    position: greedy where the request is, and as often equal as two laws drawn by inverse CDF from one number are.
    Under a grammar it is drawn within the mask behind the drafts before it, for which the host waits draft by draft.

    Args:
        programs, kv_cache: of the draft model; a layer's K and V have as many blocks as the target's group.
        sampler: the target's; it knows the requests' parameters.
        max_model_len: positions that the draft model knows.
    """

    def __init__(
        self,
        programs: ModelPrograms,
        kv_cache: KVCache,
        plan: CompilePlan,
        builder: BatchBuilder,
        sampler: DeviceSampler,
        *,
        hidden_size: int,
        dtype: jnp.dtype,
        max_model_len: int,
    ) -> None:
        self._programs = programs
        self._kv_cache = kv_cache
        self._plan = plan
        self._builder = builder
        self._sampler = sampler
        self._max_model_len = max_model_len
        self._hidden = jnp.zeros((plan.token_buckets[-1], hidden_size), dtype)
        self._newest_W = jnp.zeros(plan.max_num_seqs + 1, jnp.int32)
        self._progress = DraftProgress()

    # ---- Follower

    def capture(self, layer: int, x_TD: jax.Array) -> None:
        """It needs nothing of the target's."""

    def follow(self, step: TargetStep) -> None:
        """Computes a step with a part of a prompt; the tokens of others are left for later."""
        if step.plan.copies:
            self._copy(step.plan.copies)
        admitted = set(step.plan.admitted)
        for row in step.plan.rows:
            if row.seq in admitted:
                self._progress.admitted(row.seq, row.start)
        if any(row.num_tokens > 1 + len(row.drafts) for row in step.plan.rows):
            self._backbone(step.arrays, step.newest_W)
            for row in step.plan.rows:
                known = row.start + row.num_tokens - len(row.drafts)
                self._progress.computed(row.seq, row.start, known, row.drafts.tokens)

    def move(self, moves: Sequence[SlotMove]) -> None:
        """Its own drafts are chains, which stay where they are."""

    def warm_ups(self, builder: BatchBuilder) -> list[Callable[[], object]]:
        plan = self._plan

        def warm_draw(bucket: int) -> None:
            logits_PV = self._logits(np.zeros(bucket, np.int32))
            _, self._newest_W = self._sampler.warm_draw(bucket, logits_PV, self._newest_W)

        return [
            *(
                partial(self._backbone, builder.empty(bucket), self._newest_W)
                for bucket in plan.token_buckets
            ),
            *(
                partial(warm_draw, bucket)
                for bucket in plan.row_buckets
                if bucket <= plan.rows(plan.max_num_seqs)
            ),
            lambda: self._copy((BlockCopy(0, 0, 0),)),
        ]

    # ---- Drafter

    @property
    def slots(self) -> int:
        return 0

    def propose(self, jobs: Sequence[DraftJob]) -> list[tuple[int, ...]]:
        limits = [min(job.limit, self._max_model_len - job.seq.num_tokens) for job in jobs]
        drafting = [(job.seq, limit) for job, limit in zip(jobs, limits) if limit > 0]
        self._catch_up([seq for seq, _ in drafting])
        steps = []
        paths = ConstrainedPaths(jobs)
        for depth in range(max((limit for _, limit in drafting), default=0)):
            rows = [self._row(seq, depth) for seq, limit in drafting if limit > depth and not paths.ends(seq)]
            if not rows:
                break
            steps.append(([row.seq for row in rows], self._draw(rows, paths)))
        drafts: dict[Seq, list[int]] = {job.seq: [] for job in jobs}
        for sequences, tokens_P in steps:  # the first fetch waits for the device, after all is dispatched
            for seq, token in zip(sequences, np.asarray(tokens_P).tolist()):
                drafts[seq].append(token)
        for seq in (seq for seq, _ in drafting if drafts[seq]):
            self._progress.computed(seq, seq.num_computed, seq.num_tokens, drafts[seq][:-1])
        return [tuple(drafts[job.seq]) for job in jobs]

    def forget(self, seq: Seq) -> None:
        self._progress.forget(seq)

    # ---- parts

    def _row(self, seq: Seq, depth: int) -> ScheduledRow:
        """The token whose logits give draft ``depth``, and for the first one all that is not computed before it."""
        position = seq.num_tokens - 1 + depth
        start = position if depth else min(self._progress.of(seq), position)
        return _row(seq, start, position + 1 - start)

    def _catch_up(self, sequences: Sequence[Seq]) -> None:
        """Computes tokens until what is left fits one step."""
        budget = self._plan.token_buckets[-1]
        for _ in count():
            missing = {seq: max(1, seq.num_tokens - self._progress.of(seq)) for seq in sequences}
            if sum(missing.values()) <= budget:
                return
            rows, left = [], budget
            for seq, tokens in missing.items():
                if chunk := min(tokens - 1, left):
                    rows.append(_row(seq, self._progress.of(seq), chunk))
                    left -= chunk
            self._compute(rows)

    def _draw(self, rows: list[ScheduledRow], paths: ConstrainedPaths) -> jax.Array:
        """Computes the rows and draws the token behind each of them."""
        arrays = self._compute(rows)
        sequences = [row.seq for row in rows]
        masks = paths.masks(sequences)
        tokens_P, self._newest_W = self._sampler.draw(arrays, self._logits, self._newest_W, masks)
        if masks:  # the next masks depend on these tokens
            paths.accept(sequences, np.asarray(tokens_P).tolist())
        return tokens_P

    def _compute(self, rows: list[ScheduledRow]) -> StepArrays:
        arrays = self._builder.build(StepPlan(tuple(rows), (), (), 0))
        self._backbone(arrays, self._newest_W)
        for row in rows:
            if row.start < row.seq.num_tokens:
                self._progress.computed(row.seq, row.start, row.start + row.num_tokens)
        return arrays

    def _copy(self, copies: tuple[BlockCopy, ...]) -> None:
        self._kv_cache = copy_blocks(self._programs.copies, self._kv_cache, copies, self._plan)

    def _backbone(self, arrays: StepArrays, newest_W: jax.Array) -> None:
        self._kv_cache, self._hidden, _ = self._programs.backbone(
            self._kv_cache, self._hidden, newest_W, arrays.packed, arrays.token_bucket
        )

    def _logits(self, index_P: np.ndarray) -> jax.Array:
        return self._programs.head(self._hidden, index_P)


def _row(seq: Seq, start: int, num_tokens: int) -> ScheduledRow:
    return ScheduledRow(seq, start, num_tokens, True, seq.epoch, len(seq.output_token_ids))
