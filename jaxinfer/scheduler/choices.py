"""Choices of one request: the first of them computes their common prompt, and the others share its blocks."""

from collections.abc import Container

from jaxinfer.kv_cache.manager import KVCacheManager
from jaxinfer.request import Sequence, Status


def waits_for_parent(seq: Sequence, admitted: Container[Sequence]) -> bool:
    """A choice waits until its common prompt is computed by a step that is dispatched.

    A parent that returns in this very pass may itself wait for copies, and all copies of a step read before they
    write.

    Args:
        admitted: sequences that returned in this pass.
    """
    parent = seq.parent
    return (
        parent is not None
        and parent.status is not Status.FINISHED
        and seq.num_tokens == seq.num_prompt
        and (parent.num_computed < parent.num_prompt or parent in admitted)
    )


def parent_to_share(seq: Sequence, kv: KVCacheManager) -> Sequence | None:
    """The running choice that still holds all of the common prompt that a waiting one can see, if there is one."""
    parent = seq.parent
    shared = seq.num_prompt - 1
    if (
        parent is not None
        and parent.status is Status.RUNNING
        and seq.num_tokens == seq.num_prompt
        and shared > 0
        and kv.can_fork(parent, shared)
    ):
        return parent
    return None
