"""What a step of the engine core tells the front end: plain data that can cross a process border."""

from dataclasses import dataclass
from typing import NamedTuple

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


@dataclass(
    slots=True
)  # not frozen: one is made for every token, and frozen ones take four times as long to make
class OutputDelta:
    """News of one choice; nobody changes it.

    Attributes:
        token_ids, logprobs, text: what became final; they describe the same tokens.
        prompt_logprobs: of all prompt positions, once, with the first news of choice 0.
        finish_reason: set on the last delta of the choice.
        error: the message of an ``error`` finish.
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
