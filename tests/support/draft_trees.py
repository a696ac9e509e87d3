"""EAGLE-2's trees by their definition: each path is computed for itself, token by token, without masks."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.drafts import Drafts
from jaxinfer.scheduler.plan import ScheduledRow, StepPlan
from jaxinfer.speculative.drafter import DraftJob
from jaxinfer.speculative.head_drafter import HeadDrafter
from jaxinfer.speculative.head_entries import Before
from jaxinfer.speculative.trees.dynamic import TreeShape

Path = tuple[int, ...]
CLOSE = 1e-4
"""Differences of log-probabilities that rounding may turn."""


def paths_of(drafts: Drafts) -> set[Path]:
    return {tuple(drafts.tokens[i] for i in drafts.path(node)) for node in range(len(drafts))}


def paths_by_definition(drafter: HeadDrafter, job: DraftJob, shape: TreeShape) -> tuple[set[Path], set[Path]]:
    """The paths that a tree has, and those that are too close to its worst one to tell.

    The drafter has just proposed; what it holds behind the sequence is overwritten.
    """
    frontier: list[tuple[float, Path]] = [(0.0, ())]
    found: list[tuple[float, Path]] = []
    for _ in range(min(shape.depth, job.depth, 1 + job.slots // shape.width)):
        level = []
        for score, path in frontier:
            law_V = _law_behind(drafter, job, path)
            best = np.argsort(-law_V, kind="stable")[: shape.width].tolist()
            level += [(score + float(law_V[token]), (*path, token)) for token in best]
        frontier = sorted(level, reverse=True)[: shape.width]
        found += level
    found.sort(reverse=True)
    worst = found[min(job.limit, len(found)) - 1][0]
    best = {path for _, path in found[: job.limit]}
    return best, {path for score, path in found if abs(score - worst) < CLOSE}


def _law_behind(drafter: HeadDrafter, job: DraftJob, path: Path) -> np.ndarray:
    """Log-probabilities [V] of the head behind a path."""
    seq, entries, plan = job.seq, drafter._entries, drafter._plan
    feature_WD = drafter._feature_WD
    for depth in range(len(path) + 1):
        row = ScheduledRow(seq, seq.num_tokens - 1 + depth, 1, True, seq.epoch, len(seq.output_token_ids))
        arrays = drafter._builder.build(StepPlan((row,), (), (), 0))
        before = Before.of([row], arrays.token_bucket, plan.max_num_seqs)
        token_W = jnp.full(plan.max_num_seqs + 1, path[depth - 1] if depth else 0, jnp.int32)
        entries.compute(
            arrays.packed, arrays.token_bucket, before, token_W, feature_WD, jnp.zeros_like(entries.hidden_XD)
        )
        feature_WD = jnp.broadcast_to(entries.hidden_XD[0], feature_WD.shape)
    logits_PV = entries.logits(np.zeros(plan.row_buckets[0], np.int32))
    return np.asarray(jax.nn.log_softmax(logits_PV[0]))
