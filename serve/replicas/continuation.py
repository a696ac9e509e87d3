"""Going on with a request on another replica: what was delivered, what is left to ask for, and when that is exact."""

from dataclasses import dataclass, field, replace

from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.engine.client import EngineRequest
from jaxinfer.engine.deltas import OutputDelta


@dataclass
class Progress:
    """What a request has delivered.

    Attributes:
        open: choices without a last delta.
        token_ids: of choice 0, as far as they are needed to go on.
        began: some choice has delivered something.
    """

    request: EngineRequest
    open: set[int]
    token_ids: list[int] = field(default_factory=list)
    began: bool = False

    @classmethod
    def of(cls, request: EngineRequest) -> "Progress":
        choices = 1 if request.pooling is not None else request.params.n
        return cls(request, set(range(choices)))

    def note(self, delta: OutputDelta) -> None:
        self.began = True
        if delta.index == 0:
            self.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            self.open.discard(delta.index)


def obstacle(request: EngineRequest, speculative: SpeculativeConfig) -> str | None:
    """Why a request that has begun cannot go on elsewhere as if nothing had happened; None if it can.

    It goes on as a new request, whose prompt is the old one and what was delivered. Greedy decoding then gives the
    tokens of the uninterrupted run, as it does after a preemption, and sampling without a seed follows the same law.
    Whatever looks at the output as a whole, or at the place where it begins, would see another output.
    """
    params = request.params
    reasons = {
        # The text of a token may have been given out in part, as the rest could begin a stop string.
        "stop": bool(params.stop),
        "n": params.n > 1,
        "seed": params.seed is not None and not params.greedy,
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "repetition_detection": params.repetition_detection is not None,
        "structured_outputs": params.structured_outputs is not None,
        "thinking_token_budget": params.thinking_token_budget is not None,
        "bad_words": bool(params.bad_words),
        "extra_args": bool(params.extra_args),
        "speculative.acceptance": speculative.acceptance != "exact",
    }
    return next((name for name, holds in reasons.items() if holds), None)


def continued(progress: Progress) -> EngineRequest | None:
    """The request for what is left, or None if only the word that it ended is missing.

    What came once with the first news (log-probabilities of the prompt) is not asked for again.
    """
    request, delivered = progress.request, progress.token_ids
    params, count = request.params, len(progress.token_ids)
    if params.max_tokens is not None and count >= params.max_tokens:
        return None
    rest = replace(
        params,
        max_tokens=None if params.max_tokens is None else params.max_tokens - count,
        min_tokens=max(params.min_tokens - count, 0),
        prompt_logprobs=None,
        prompt_logprob_token_ids=None,
        prompt_logprob_start=None,
    )
    return replace(request, prompt_token_ids=(*request.prompt_token_ids, *delivered), params=rest)


def lost_message(because: str | None) -> str:
    """What a client reads whose request could not go on.

    Args:
        because: what stands in the way, if anything but the setting does.
    """
    message = "the replica that generated this answer was lost"
    if because is None:
        return message
    return f"{message}, and an answer with {because} cannot go on elsewhere as if nothing had happened"
