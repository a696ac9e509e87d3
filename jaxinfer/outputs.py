"""What users get back: results of requests, in the shapes known from vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """Log-probability of one token at one position.

    Attributes:
        rank: 1 + number of tokens that are strictly more likely; None for tokens that were asked for by id.
        decoded_token: its text; None without detokenization.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Log-probabilities at one position by token id; the chosen token is always in it."""


@dataclass
class FlatLogprobs:
    """Log-probabilities of many positions in flat lists: far fewer objects than one dict per position.

    Attributes:
        starts, ends: the entries of position i are ``starts[i]:ends[i]``; the first one is the chosen token.
    """

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, position: PositionLogprobs | None) -> None:
        self.starts.append(len(self.token_ids))
        for token, entry in (position or {}).items():
            self.token_ids.append(token)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.ends.append(len(self.token_ids))

    def copy(self) -> "FlatLogprobs":
        return FlatLogprobs(**{name: list(values) for name, values in vars(self).items()})

    def __len__(self) -> int:
        return len(self.starts)


Logprobs = list[PositionLogprobs] | FlatLogprobs
PromptLogprobs = list[PositionLogprobs | None] | FlatLogprobs


@dataclass
class CompletionOutput:
    """One choice.

    Text, token ids and log-probabilities describe the same tokens. A token or string that ended the choice is part
    of them only with ``include_stop_str_in_output``.

    Attributes:
        cumulative_logprob: sum over the generated tokens; None without log-probabilities.
        finish_reason: stop, length, abort, error or repetition; None while it runs.
        stop_reason: the stop string or stop token id; None for EOS and everything else.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds on the clock of ``time.monotonic``; None for what has not happened.

    Attributes:
        num_draft_tokens, num_accepted_tokens: tokens of verified drafts, and those of them that were right.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass
class RequestOutput:
    """The state of a request.

    Attributes:
        prompt_logprobs: one entry per prompt token, None for the first and for those that were not asked for.
        outputs: the choices; only those with news if the request streams deltas.
        num_cached_tokens: prompt tokens that were found in the prefix cache.
        error: why the request failed, if it did.
        embedding: pooled hidden state of a pooled request, float32 precision, not normalised.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    embedding: tuple[float, ...] | None = None
