"""Pooled states of runners that have no model."""

import numpy as np

from jaxinfer.runner.protocol import pooled_positions
from jaxinfer.scheduler.plan import StepPlan

WIDTH = 16


def pooled_stand_in(plan: StepPlan) -> dict[int, np.ndarray]:
    """As ``StepResult.pooled``, of "hidden states" [WIDTH] that are a function of token and position."""
    pooled = {}
    for index, row in enumerate(plan.rows):
        if row.seq.reads_prompt and (positions := pooled_positions(row)):
            tokens_T = np.array(row.seq.request.prompt_token_ids[positions.start : positions.stop])
            phase_TX = (tokens_T[:, None] + 1) * (np.arange(WIDTH) + 1) + np.array(positions)[:, None]
            pooled[index] = np.sin(phase_TX).sum(0).astype(np.float32)
    return pooled
