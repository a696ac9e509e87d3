"""From records to numbers: percentiles, throughput, goodput, and the JSON result.

Keys are those of ``vllm bench serve``, so that scripts that read its results read ours; what it does not have follows
behind.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serve.bench.records import RequestRecord

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


@dataclass(frozen=True)
class Limit:
    """A service level: the metric of a request must not exceed so many milliseconds."""

    metric: str
    milliseconds: float

    @classmethod
    def parse(cls, text: str) -> "Limit":
        """Reads ``ttft:200``.

        Raises:
            ValueError: another form, or a metric that single requests do not have.
        """
        metric, _, value = text.partition(":")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if metric not in ("ttft", "tpot", "e2el") or not number > 0:
            raise ValueError(
                f"goodput limit {text!r} is wrong; write ttft:200, tpot:50 or e2el:3000 (milliseconds)"
            )
        return cls(metric, number)

    def met(self, record: RequestRecord) -> bool:
        """A request of one token has no TPOT and meets every limit on it."""
        seconds = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.e2el}[self.metric]
        return seconds * 1000 <= self.milliseconds


@dataclass(frozen=True)
class Summary:
    """What a load did.

    Attributes:
        duration: seconds from the first request sent to the last chunk.
        goodput: requests per second that met all limits; None without limits.
        samples: milliseconds by metric: TTFT, TPOT and E2EL of requests, ITL of all gaps.
        tokens_per_second: output tokens in each second of the load.
        lag: largest delay in seconds that the load generator itself added to a request.
    """

    duration: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    goodput: float | None
    samples: Mapping[str, np.ndarray]
    tokens_per_second: np.ndarray
    max_concurrent: int
    lag: float | None
    errors: Mapping[str, int]


def summarize(
    records: Sequence[RequestRecord], limits: Sequence[Limit] = (), max_concurrency: int | None = None
) -> Summary:
    done = [record for record in records if record.ok]
    start = min((record.sent for record in records), default=0.0)
    duration = max((record.ended for record in done), default=start) - start
    good = sum(all(limit.met(record) for limit in limits) for record in done)
    samples = {
        "ttft": [record.ttft for record in done],
        "tpot": [record.tpot for record in done if record.tpot is not None],
        "itl": [gap for record in done for gap in record.itl],
        "e2el": [record.e2el for record in done],
    }
    # With a limit on concurrency a late request waited for a place, which is not the generator's doing.
    lag = max((r.sent - r.due for r in records), default=0.0) if max_concurrency is None else None
    return Summary(
        duration=duration,
        completed=len(done),
        failed=len(records) - len(done),
        input_tokens=sum(record.num_prompt_tokens for record in done),
        output_tokens=sum(record.num_output_tokens for record in done),
        cached_tokens=sum(record.cached_tokens or 0 for record in done),
        goodput=_per_second(good, duration) if limits else None,
        samples={name: np.array(values, float) * 1000 for name, values in samples.items()},
        tokens_per_second=_rate(done, start, duration),
        max_concurrent=int(concurrency(done)[1].max(initial=0)),
        lag=lag,
        errors=Counter(record.error or "no output" for record in records if not record.ok),
    )


def concurrency(records: Sequence[RequestRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Times at which the number of requests in flight changes, and the number from then on."""
    sent, ended = [r.sent for r in records], [r.ended for r in records]
    times = np.array([*sent, *ended], float)
    steps = np.array([1] * len(sent) + [-1] * len(ended), int)
    # At equal times an end counts before a start: the next request took the place of the last.
    order = np.lexsort((steps, times))
    return times[order], steps[order].cumsum()


def _rate(records: Sequence[RequestRecord], start: float, duration: float) -> np.ndarray:
    """Output tokens per second of the load; the tokens of a request are spread evenly over its chunks."""
    if not records:
        return np.zeros(0)
    times = np.concatenate([np.array(record.times) - start for record in records])
    weights = [np.full(len(record.times), record.num_output_tokens / len(record.times)) for record in records]
    seconds = np.minimum(times.astype(int), int(duration))
    return np.bincount(seconds, weights=np.concatenate(weights))


def statistics(summary: Summary, metrics: Sequence[str], percentiles: Sequence[float]) -> dict[str, float]:
    """``mean_ttft_ms``, ``median_...``, ``std_...``, ``p99_...`` for each metric; 0 without samples."""
    result: dict[str, float] = {}
    for metric in metrics:
        values = summary.samples[metric]
        values = values if values.size else np.zeros(1)
        result[f"mean_{metric}_ms"] = float(values.mean())
        result[f"median_{metric}_ms"] = float(np.median(values))
        result[f"std_{metric}_ms"] = float(values.std())
        for percentile in percentiles:
            result[f"p{percentile:g}_{metric}_ms"] = float(np.percentile(values, percentile))
    return result


def totals(summary: Summary) -> dict[str, Any]:
    """Counts and rates of a load, under the names of ``vllm bench serve``."""
    seconds = summary.duration
    tokens = summary.input_tokens + summary.output_tokens
    return {
        "duration": seconds,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": _per_second(summary.completed, seconds),
        "request_goodput": summary.goodput,
        "output_throughput": _per_second(summary.output_tokens, seconds),
        "total_token_throughput": _per_second(tokens, seconds),
        "max_output_tokens_per_s": float(summary.tokens_per_second.max(initial=0.0)),
        "max_concurrent_requests": summary.max_concurrent,
        "cached_prompt_tokens": summary.cached_tokens,
        "load_generator_lag_s": summary.lag,
        "error_counts": dict(summary.errors),
    }


def details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """One entry per request, in the order of arrival; seconds. Failed requests have empty entries."""
    return {
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens if record.ok else 0 for record in records],
        "ttfts": [record.ttft if record.ok else 0.0 for record in records],
        "itls": [record.itl for record in records],
        "latencies": [record.e2el if record.ok else 0.0 for record in records],
        "start_times": [record.sent for record in records],
        "queue_times": [record.sent - record.due for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error or "" for record in records],
    }


def _per_second(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
