"""Masks of the samples behind drafts."""

import numpy as np

from jaxinfer.drafts import Drafts
from jaxinfer.structured.constraint import Constraint


def masks_along(drafts: Drafts, constraint: Constraint) -> dict[int, np.ndarray]:
    """Mask of the sample behind each draft that the constraint allows and behind which something may follow."""
    masks: dict[int, np.ndarray] = {}
    after: dict[int, Constraint] = {-1: constraint}
    for node, (token, parent) in enumerate(zip(drafts.tokens, drafts.parents)):
        if parent not in after:
            continue
        path = after[parent].fork()
        if not path.accept(token) or path.complete:
            continue
        mask_X = path.next_mask()
        if mask_X.any():
            masks[node], after[node] = mask_X, path
    return masks
