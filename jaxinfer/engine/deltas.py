"""What a step of the engine core tells the front end: plain data that can cross a process border."""

from typing import NamedTuple

import msgspec

from jaxinfer.outputs import RequestMetrics
from jaxinfer.request import FinishReason


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position.

    Attributes:
        token_id, logprob, rank: of the chosen token.
        top: the most likely tokens and their log-probabilities, best first, as many as were asked for.
        named: those asked for by id.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    named: tuple[tuple[int, float], ...] = ()


class OutputDelta(msgspec.Struct, array_like=True, gc=False):
    """News of one choice. One is made for every token: a ``Struct`` is made, and sent to another process, fast.

    Attributes:
        token_ids, logprobs, text: what became final; they describe the same tokens.
        prompt_logprobs: of all prompt positions, once, with the first news of choice 0.
        finish_reason: set on the last delta of the choice.
        error: the message of an ``error`` finish.
        embedding: of a pooled request, with its last delta; not normalised.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    embedding: tuple[float, ...] | None = None
