"""``jaxinfer bench serve``: a load against a running server."""

import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from serve.bench.datasets import TokenSource
from serve.bench.load import Arrival, LoadGenerator, RequestShape
from serve.bench.options import ServeOptions
from serve.bench.records import RequestRecord
from serve.bench.report import Summary, details, statistics, summarize, totals
from serve.bench.scrape import difference, scrape
from serve.bench.stream_client import StreamClient
from serve.bench.tables import print_result
from serve.bench.tokens import LocalTokens, RemoteTokens


class ServerError(ValueError):
    """The server cannot be measured; the message says why."""


def run_serving(options: ServeOptions, console: Console | None = None) -> dict[str, Any]:
    """Runs one load and reports it: progress and table on ``console``, JSON and plot where the options say.

    Returns:
        The JSON result.

    Raises:
        ServerError: the server does not answer, or serves no model.
        DatasetError, ValueError: the options do not fit.
    """
    with httpx.Client(base_url=options.url, headers=_headers(options), timeout=30.0) as client:
        model = options.model or first_model(client)
        tokens = _tokens(options, client, model)
        requests = options.dataset.load(tokens, text_only=options.endpoint == "chat")
        arrivals = options.arrivals.schedule(requests)
        before = scrape(client)
        records = uvloop.run(_measure(options, model, arrivals, console))
        counters = difference(before, scrape(client))
    summary = summarize(records, options.report.limits, options.arrivals.max_concurrency)
    result = {
        **_settings(options, model, len(records)),
        **totals(summary),
        **counters,
        **statistics(summary, options.report.metrics, options.report.percentiles),
    }
    if console is not None:
        print_result(console, result, options.report.metrics, options.report.percentiles)
    _write(options, result, summary, records)
    return result


def first_model(client: httpx.Client) -> str:
    """The first name that the server lists."""
    try:
        response = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ServerError(f"no answer from {client.base_url}: {error}") from None
    if response.status_code != 200:
        raise ServerError(f"/v1/models answered {response.status_code}: {response.text[:200]}")
    models = response.json().get("data", [])
    if not models:
        raise ServerError("the server lists no model; give --model")
    return str(models[0]["id"])


def _tokens(options: ServeOptions, client: httpx.Client, model: str) -> TokenSource:
    if options.tokenizer is not None:
        return LocalTokens.load(options.tokenizer)
    return RemoteTokens(client, model, options.vocab_size)


async def _measure(
    options: ServeOptions, model: str, arrivals: Sequence[Arrival], console: Console | None
) -> list[RequestRecord]:
    client = StreamClient(options.url, _headers(options), options.timeout)
    shape = RequestShape(model, options.endpoint, options.ignore_eos, options.extra)
    generator = LoadGenerator(client, shape, keep_text=options.report.detailed)
    try:
        warm = [replace(arrivals[0], at=0.0)] * options.warmups if arrivals else []
        await generator.run(warm, max_concurrency=1)
        with _Bar(console, len(arrivals)) as bar:
            return await generator.run(arrivals, options.arrivals.max_concurrency, bar.count)
    finally:
        client.close()


class _Bar:
    """Finished requests, failures and output tokens per second so far; drawn on terminals only."""

    def __init__(self, console: Console | None, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=console is None or not console.is_terminal,
            transient=True,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("sending", total=total)
        self._tokens = self._failed = 0
        self._start = time.perf_counter()

    def count(self, record: RequestRecord) -> None:
        self._tokens += record.num_output_tokens
        self._failed += not record.ok
        rate = self._tokens / (time.perf_counter() - self._start)
        failed = f", {self._failed} failed" if self._failed else ""
        self._progress.update(self._task, advance=1, description=f"{rate:.0f} tok/s{failed}")

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _headers(options: ServeOptions) -> dict[str, str]:
    return {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}


def _settings(options: ServeOptions, model: str, count: int) -> dict[str, Any]:
    """What was measured, for whoever reads the file later."""
    arrivals = options.arrivals
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "machine": platform.processor() or platform.machine(),
        "backend": "openai-chat" if options.endpoint == "chat" else "openai",
        "model_id": model,
        "tokenizer_id": options.tokenizer,
        "num_prompts": count,
        "dataset": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options.dataset).items()},
        "request_rate": arrivals.rate if arrivals.rate != float("inf") else "inf",
        "burstiness": arrivals.burstiness if arrivals.burstiness != float("inf") else "inf",
        "ramp_up": asdict(arrivals.ramp) if arrivals.ramp else None,
        "max_concurrency": arrivals.max_concurrency,
        "ignore_eos": options.ignore_eos,
        "extra_body": options.extra,
        "goodput_ms": {limit.metric: limit.milliseconds for limit in options.report.limits},
    }


def _write(
    options: ServeOptions, result: Mapping[str, Any], summary: Summary, records: Sequence[RequestRecord]
) -> None:
    report = options.report
    if report.output is not None:
        content = {**result, **(details(records) if report.detailed else {})}
        report.output.parent.mkdir(parents=True, exist_ok=True)
        report.output.write_text(json.dumps(content, indent=1))
    if report.plot is not None:
        # matplotlib takes a second to import, and only the plot needs it.
        from serve.bench.plot import plot_load

        plot_load(
            summary, records, report.plot, f"{result['model_id']}: {result['output_throughput']:.0f} tok/s"
        )
