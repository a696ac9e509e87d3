"""What the benchmark commands are told, checked before anything runs."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from serve.bench.arrivals import RampUp, arrival_times
from serve.bench.datasets import (
    BenchRequest,
    DatasetError,
    Lengths,
    TokenSource,
    as_text,
    random_requests,
    shared_prefix_requests,
    sharegpt_requests,
    trace_requests,
)
from serve.bench.load import Arrival, Endpoint
from serve.bench.report import METRICS, Limit

DatasetName = Literal["random", "shared-prefix", "sharegpt", "trace"]
DATASETS: tuple[DatasetName, ...] = ("random", "shared-prefix", "sharegpt", "trace")


@dataclass(frozen=True)
class DatasetOptions:
    """Which questions.

    Attributes:
        path: of the file, for ``sharegpt`` and ``trace``.
        count: number of requests; None: 100, or all of a trace.
        lengths: of ``random`` and ``shared-prefix``.
        output_len: replaces the lengths of answers in a ShareGPT file.
        speed, block_size: of a trace.
    """

    name: DatasetName = "random"
    path: Path | None = None
    count: int | None = None
    lengths: Lengths = field(default_factory=lambda: Lengths(128, 128))
    output_len: int | None = None
    num_prefixes: int = 1
    prefix_len: int = 128
    speed: float = 1.0
    block_size: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            raise DatasetError(f"dataset {self.name!r} is not known; there are {', '.join(DATASETS)}")
        if self.count is not None and self.count < 1:
            raise DatasetError(f"the number of prompts must be positive (given: {self.count})")
        if self.name in ("sharegpt", "trace") and self.path is None:
            raise DatasetError(f"dataset {self.name} needs --dataset-path")

    def load(self, tokens: TokenSource, text_only: bool) -> list[BenchRequest]:
        requests = self._requests(tokens)
        return as_text(requests, tokens) if text_only else requests

    def _requests(self, tokens: TokenSource) -> list[BenchRequest]:
        count = self.count or 100
        if self.name == "random":
            return random_requests(count, self.lengths, tokens, self.seed)
        if self.name == "shared-prefix":
            return shared_prefix_requests(
                count, self.num_prefixes, self.prefix_len, self.lengths, tokens, self.seed
            )
        assert self.path is not None
        if self.name == "sharegpt":
            return sharegpt_requests(self.path, count, tokens, self.seed, self.output_len)
        return trace_requests(self.path, self.count, tokens, self.seed, self.speed, self.block_size)


@dataclass(frozen=True)
class ArrivalOptions:
    """When they come.

    Attributes:
        rate: requests per second; ``inf``: all at once, or as fast as ``max_concurrency`` allows.
        burstiness: shape of the gamma distribution of the gaps; 1 is Poisson, ``inf`` constant.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    ramp: RampUp | None = None
    max_concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max concurrency must be positive (given: {self.max_concurrency})")

    def schedule(self, requests: list[BenchRequest]) -> list[Arrival]:
        """Requests of a trace keep their times."""
        times = arrival_times(len(requests), self.rate, self.burstiness, self.seed, self.ramp)
        return [
            Arrival(float(time) if request.at is None else request.at, request)
            for time, request in zip(times, requests)
        ]


@dataclass(frozen=True)
class ReportOptions:
    """What is reported, and where to.

    Attributes:
        metrics, percentiles: of the latencies.
        limits: for goodput.
        output: JSON file.
        plot: PNG file.
        detailed: the JSON holds every request.
    """

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    percentiles: tuple[float, ...] = (50, 90, 95, 99)
    limits: tuple[Limit, ...] = ()
    output: Path | None = None
    plot: Path | None = None
    detailed: bool = False


@dataclass(frozen=True)
class ServeOptions:
    """Everything ``jaxinfer bench serve`` does.

    Attributes:
        model: name to ask for; None: the server's first.
        tokenizer: reference of a tokenizer on this machine; None: the server's.
        warmups: requests sent before, one after the other, and not measured.
        extra: fields of every request body.
    """

    url: str
    model: str | None = None
    endpoint: Endpoint = "completions"
    api_key: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    warmups: int = 1
    ignore_eos: bool = False
    timeout: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)
    dataset: DatasetOptions = DatasetOptions()
    arrivals: ArrivalOptions = ArrivalOptions()
    report: ReportOptions = ReportOptions()


def parse_metrics(text: str) -> tuple[str, ...]:
    """Reads ``ttft,tpot``."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [name for name in names if name not in METRICS]
    if unknown or not names:
        raise ValueError(f"metrics {text!r} are wrong; choose from {','.join(METRICS)}")
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Reads ``50,99.9``."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value <= 100 for value in values):
        raise ValueError(f"percentiles {text!r} are wrong; write numbers from 0 to 100, for example 50,90,99")
    return values


def parse_limits(texts: list[str]) -> tuple[Limit, ...]:
    """Reads ``ttft:200`` and the like; one text may hold several, with commas between."""
    return tuple(Limit.parse(part) for text in texts for part in text.split(",") if part)
