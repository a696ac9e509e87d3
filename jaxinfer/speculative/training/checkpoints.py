"""Checkpoints of a training run, written with Orbax: a run that is killed goes on from the newest complete one."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

_KEPT = 2


def save_state(directory: Path, step: int, state: Any) -> None:
    """Writes a pytree of arrays as the state after ``step`` steps, and drops all but the newest checkpoints.

    Orbax renames a checkpoint when it is complete, so one under its final name can be read.
    """
    import orbax.checkpoint as ocp  # 1 s, and only training needs it

    leaves = {f"{i:05d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save((directory / f"{step:08d}").absolute(), leaves, force=True)
    for old in _complete(directory)[:-_KEPT]:
        shutil.rmtree(directory / f"{old:08d}")


def restore_state(directory: Path, like: Any) -> tuple[int, Any] | None:
    """The newest complete state and its step; None if there is none.

    Args:
        like: a pytree of the same structure.
    """
    steps = _complete(directory)
    if not steps:
        return None
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        leaves = checkpointer.restore((directory / f"{steps[-1]:08d}").absolute())
    values = [jax.numpy.asarray(leaves[key]) for key in sorted(leaves)]
    return steps[-1], jax.tree.unflatten(jax.tree.structure(like), values)


def _complete(directory: Path) -> list[int]:
    """Steps of the complete checkpoints, oldest first; partial ones have other names."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())
