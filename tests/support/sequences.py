"""Sequences for unit tests of scheduler, block pool and builder."""

import itertools
from collections.abc import Iterable

from jaxinfer.request import Request, Sequence
from jaxinfer.sampling_params import SamplingParams

_order = itertools.count()


def make_sequence(
    prompt: Iterable[int],
    params: SamplingParams | None = None,
    *,
    name: str = "",
    priority: int = 0,
    max_tokens: int = 16,
    num_groups: int = 1,
    salt: str | None = None,
    index: int = 0,
    parent: Sequence | None = None,
) -> Sequence:
    """A waiting sequence; each call gives a later one than the call before."""
    order = next(_order)
    params = params or SamplingParams(detokenize=False)
    request = Request(name or f"r{order}", None, tuple(prompt), params, priority, salt)
    return Sequence(
        request=request,
        index=index,
        order=order,
        max_tokens=max_tokens,
        key=(order, 0),
        num_groups=num_groups,
        parent=parent,
    )
