"""Usage and times as answers show them."""

from jaxinfer.outputs import RequestMetrics
from serve.generation import UsageCounts
from serve.protocol.common import CompletionTokensDetails, Metrics, PromptTokensDetails, Usage


def usage_of(counts: UsageCounts, reasoning_tokens: int | None = None) -> Usage:
    usage = Usage(
        prompt_tokens=counts.prompt,
        completion_tokens=counts.completion,
        total_tokens=counts.prompt + counts.completion,
        prompt_tokens_details=PromptTokensDetails(counts.cached),
    )
    if reasoning_tokens is not None:
        usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens)
    return usage


def metrics_of(times: RequestMetrics, completion_tokens: int) -> Metrics:
    """Times of a request with one choice, in milliseconds."""
    generation = _between(times.first_token_time, times.finished_time)
    gaps = completion_tokens - 1
    spread = generation is not None and generation > 0 and gaps > 0
    return Metrics(
        queue_time_ms=_between(times.arrival_time, times.first_scheduled_time),
        prefill_time_ms=_between(times.first_scheduled_time, times.first_token_time),
        time_to_first_token_ms=_between(times.arrival_time, times.first_token_time),
        generation_time_ms=generation,
        mean_itl_ms=generation / gaps if spread and generation is not None else None,
        tokens_per_second=1e3 * gaps / generation if spread and generation is not None else None,
        num_preemptions=times.num_preemptions,
        num_draft_tokens=times.num_draft_tokens,
        num_accepted_tokens=times.num_accepted_tokens,
    )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else 1e3 * (end - start)
