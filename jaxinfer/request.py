"""The nouns of the engine: a user's request, and the sequences that the scheduler runs for it."""

import enum
import time
from dataclasses import dataclass, field
from typing import Literal

from jaxinfer.drafts import NO_DRAFTS, Drafts
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.structured.constraint import Constraint


class RequestError(ValueError):
    """A request that cannot be served, with the reason; raised before it is admitted.

    Attributes:
        param: the parameter at fault, or None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(RuntimeError):
    """The admission limit is reached; the request may be tried again later."""


Pooling = Literal["mean", "last"]
"""One vector for a prompt: the mean of the hidden states at all positions, or the one at the last."""


class Status(enum.Enum):
    WAITING = "waiting"
    FETCHING = "fetching"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


@dataclass(frozen=True)
class Request:
    """What a user asked for, validated.

    Attributes:
        prompt: the text, if the prompt was text.
        prompt_token_ids: at least one id, all in the vocabulary.
        priority: smaller is more urgent; used by the priority policy.
        bad_words: token sequences that must not be generated.
        cache_salt: isolates the prefix cache; requests share blocks only under equal salts.
        pooling: give the pooled hidden state of the prompt and generate nothing.
        arrival_time: seconds, ``time.monotonic``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    pooling: Pooling | None = None
    arrival_time: float = field(default_factory=time.monotonic)


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of a request: the unit that the scheduler runs.

    The scheduler knows two numbers of it: how many of its tokens are computed (``num_computed``, counted when a step
    is dispatched) and how many it has (``num_tokens``, those included that are sampled on the device and not yet
    known to the host).

    Attributes:
        index: choice index within the request.
        order: arrival number; ties of priority are broken by it.
        max_tokens: most tokens to generate, already cut to the room in the context.
        key: key data of the random stream, two uint32.
        num_prompt: tokens of the prompt.
        reads_prompt: something is wanted of the positions of the prompt: log-probabilities or pooled states.
        num_in_flight: tokens sampled in dispatched steps whose results are not committed yet.
        num_committed: computed tokens of committed steps; KV up to here is known to be sound.
        slot: batch slot, or -1.
        tables: block ids per KV group; 0 where a block left the sliding window.
        digests: prefix-cache digests of the full blocks, as far as they were needed.
        num_filed: full blocks already offered to the prefix cache.
        num_cached: prompt tokens that the first admission found in the prefix cache; -1 before it.
        preemptions: times it lost its blocks; ``yielded`` counts those in favour of more urgent requests.
        epoch: grows at each preemption; results of older epochs do not move ``num_committed``.
        parent: sibling whose prompt blocks this choice shares once they are computed.
        may_fetch: another engine may compute its prompt; False once that failed.
        lacks: digest of the first block that another engine has to compute for it, as of when it was last looked up in
            the prefix cache; None: not looked up since that could have changed.
        constraint: set if the tokens allowed next depend on tokens that the host must know first.
        drafts: guesses of the tokens behind the newest one, for the next step to verify.
        num_drafted, num_accepted: tokens of verified drafts, and those of them that were right.
    """

    request: Request
    index: int
    order: int
    max_tokens: int
    key: tuple[int, int]
    num_groups: int = 1
    parent: "Sequence | None" = None
    may_fetch: bool = False
    lacks: bytes | None = None
    constraint: Constraint | None = None
    drafts: Drafts = NO_DRAFTS
    output_token_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_computed: int = 0
    num_committed: int = 0
    num_in_flight: int = 0
    slot: int = -1
    tables: list[list[int]] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    num_filed: int = 0
    num_cached: int = -1
    preemptions: int = 0
    yielded: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    epoch: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    num_prompt: int = field(init=False)
    reads_prompt: bool = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.num_prompt = len(request.prompt_token_ids)
        self.reads_prompt = request.pooling is not None or request.params.prompt_logprobs is not None
        if not self.tables:
            self.tables = [[] for _ in range(self.num_groups)]

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + len(self.output_token_ids) + self.num_in_flight

    @property
    def urgency(self) -> tuple[int, int]:
        """Sorts the most urgent sequence first under the priority policy."""
        return (self.request.priority, self.order)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """The known tokens of positions ``start`` to ``stop``."""
        prompt, n = self.request.prompt_token_ids, self.num_prompt
        if stop <= n:
            return list(prompt[start:stop])
        if start >= n:
            return self.output_token_ids[start - n : stop - n]
        return list(prompt[start:n]) + self.output_token_ids[: stop - n]
