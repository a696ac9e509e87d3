"""Which drafts of a row count, given the samples before them."""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxinfer.structured.constraint import Constraint


def num_matching(drafts: Sequence[int], samples: Iterable[int]) -> int:
    """Leading drafts that equal the samples at their positions; they, and the sample behind them, count."""
    count = 0
    for draft, sample in zip(drafts, samples):
        if draft != sample:
            break
        count += 1
    return count


def masks_along(drafts: Sequence[int], constraint: Constraint) -> list[np.ndarray]:
    """Masks of the samples behind each draft, as far as the constraint allows the drafts and something may follow."""
    masks: list[np.ndarray] = []
    path = constraint.fork() if drafts else constraint
    for draft in drafts:
        if not path.accept(draft) or path.complete:
            break
        mask_X = path.next_mask()
        if not mask_X.any():
            break
        masks.append(mask_X)
    return masks
