"""``jaxinfer bench``: the load generator and the offline measurements on the command line."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress

from jaxinfer.config import EngineConfig
from serve.bench.arrivals import RampUp
from serve.bench.datasets import Lengths
from serve.bench.load import Endpoint
from serve.bench.options import (
    ArrivalOptions,
    DatasetName,
    DatasetOptions,
    ReportOptions,
    ServeOptions,
    parse_limits,
    parse_metrics,
    parse_percentiles,
)
from serve.overrides import parse_overrides

bench = typer.Typer(no_args_is_help=True, help="Measure a running server, or the engine alone.")

DEFAULT_CONFIG = "configs/smollm2-135m.yaml"
EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}

DatasetOption = Annotated[
    DatasetName, typer.Option(help="What is asked; docs/benchmarks.md has the file formats.")
]
PathOption = Annotated[Path | None, typer.Option("--dataset-path", help="File of sharegpt or trace.")]
CountOption = Annotated[int | None, typer.Option("--num-prompts", help="Requests; 100, or all of a trace.")]
InputOption = Annotated[int, typer.Option("--input-len", help="Prompt tokens of random requests.")]
OutputOption = Annotated[int, typer.Option("--output-len", help="Tokens to generate.")]
RatioOption = Annotated[float, typer.Option("--range-ratio", help="Lengths vary by this part of themselves.")]
PrefixesOption = Annotated[int, typer.Option("--num-prefixes", help="Different shared prefixes.")]
PrefixLenOption = Annotated[int, typer.Option("--prefix-len", help="Tokens of a shared prefix.")]
JsonOption = Annotated[Path | None, typer.Option("--output", help="JSON file for the result.")]
ConfigOption = Annotated[str, typer.Option("--config", help="YAML file or model reference.")]
TemperatureOption = Annotated[float | None, typer.Option(help="0 is greedy; absent: the server's default.")]


@bench.command("serve", context_settings={"allow_extra_args": True})
def serve_command(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Name to ask for; absent: the first listed.")] = None,
    endpoint: Annotated[Endpoint, typer.Option(help="Streams of this kind.")] = "completions",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Reference of a local tokenizer; absent: the server's own is asked.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Random ids stay below it.")] = None,
    dataset: DatasetOption = "random",
    dataset_path: PathOption = None,
    num_prompts: CountOption = None,
    input_len: InputOption = 128,
    output_len: OutputOption = 128,
    sharegpt_output_len: Annotated[int | None, typer.Option(help="Instead of the answers' lengths.")] = None,
    range_ratio: RatioOption = 0.0,
    num_prefixes: PrefixesOption = 1,
    prefix_len: PrefixLenOption = 128,
    trace_speed: Annotated[float, typer.Option(help="Divides timestamps; 1000 reads milliseconds.")] = 1.0,
    trace_block_size: Annotated[int, typer.Option(help="Tokens per entry of hash_ids.")] = 512,
    request_rate: Annotated[float, typer.Option(help="Requests per second; inf: all at once.")] = math.inf,
    burstiness: Annotated[float, typer.Option(help="1 Poisson, below 1 bursty, inf constant.")] = 1.0,
    ramp_up: Annotated[
        Literal["linear", "exponential"] | None, typer.Option("--ramp-up-strategy", help="The rate rises.")
    ] = None,
    ramp_start: Annotated[float, typer.Option("--ramp-up-start-rps")] = 1.0,
    ramp_end: Annotated[float, typer.Option("--ramp-up-end-rps")] = 10.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Requests at a time: a closed loop.")] = None,
    num_warmups: Annotated[int, typer.Option(help="Requests before the measurement.")] = 1,
    temperature: TemperatureOption = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate all tokens.")] = False,
    extra_body: Annotated[str | None, typer.Option(help="JSON object of further request fields.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = 600.0,
    percentile_metrics: Annotated[str, typer.Option(help="Of ttft, tpot, itl, e2el.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles to report.")] = "50,90,95,99",
    goodput: Annotated[
        list[str] | None, typer.Option(help="Limits in milliseconds: ttft:200 tpot:50 e2el:3000.")
    ] = None,
    seed: int = 0,
    output: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file.")] = None,
    detailed: Annotated[bool, typer.Option("--save-detailed", help="Every request in the JSON.")] = False,
) -> None:
    """Send a load to a server that speaks the OpenAI API, and report latencies and throughput."""
    from serve.bench.serving import run_serving

    lengths = Lengths(input_len, output_len, range_ratio)
    extra = _extra_body(extra_body, temperature)
    result = run_serving(
        ServeOptions(
            url=url,
            model=model,
            endpoint=endpoint,
            api_key=api_key,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            warmups=num_warmups,
            ignore_eos=ignore_eos,
            timeout=timeout,
            extra=extra,
            dataset=DatasetOptions(
                name=dataset,
                path=dataset_path,
                count=num_prompts,
                lengths=lengths,
                output_len=sharegpt_output_len,
                num_prefixes=num_prefixes,
                prefix_len=prefix_len,
                speed=trace_speed,
                block_size=trace_block_size,
                seed=seed,
            ),
            arrivals=ArrivalOptions(
                rate=request_rate,
                burstiness=burstiness,
                ramp=RampUp(ramp_up, ramp_start, ramp_end) if ramp_up else None,
                max_concurrency=max_concurrency,
                seed=seed,
            ),
            report=ReportOptions(
                metrics=parse_metrics(percentile_metrics),
                percentiles=parse_percentiles(metric_percentiles),
                limits=parse_limits([*(goodput or []), *_more_limits(context.args, goodput)]),
                output=output,
                plot=plot,
                detailed=detailed,
            ),
        ),
        Console(),
    )
    if not result["completed"]:
        sys.exit(1)


@bench.command("throughput", context_settings=EXTRA)
def throughput_command(
    context: typer.Context,
    config: ConfigOption = DEFAULT_CONFIG,
    dataset: DatasetOption = "random",
    dataset_path: PathOption = None,
    num_prompts: CountOption = None,
    input_len: InputOption = 128,
    output_len: OutputOption = 128,
    range_ratio: RatioOption = 0.0,
    num_prefixes: PrefixesOption = 1,
    prefix_len: PrefixLenOption = 128,
    n: Annotated[int, typer.Option(help="Choices per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos/--stop-at-eos")] = True,
    detokenize: Annotated[bool, typer.Option("--detokenize/--disable-detokenize")] = True,
    seed: int = 0,
    output: JsonOption = None,
) -> None:
    """All requests at once, offline."""
    from jaxinfer.llm import LLM
    from jaxinfer.sampling_params import SamplingParams
    from serve.bench.offline import throughput

    questions = DatasetOptions(
        name=dataset,
        path=dataset_path,
        count=num_prompts,
        lengths=Lengths(input_len, output_len, range_ratio),
        num_prefixes=num_prefixes,
        prefix_len=prefix_len,
        seed=seed,
    )
    llm = LLM(EngineConfig.load(config, parse_overrides(context.args)))
    params = SamplingParams(n=n, temperature=temperature, ignore_eos=ignore_eos, detokenize=detokenize)
    result = throughput(llm, questions, params)
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.2f} total "
        f"tokens/s, {result['output_tokens_per_second']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {result['total_prompt_tokens']}")
    print(f"Total num output tokens:  {result['total_output_tokens']}")
    _save(output, result)
    if result["failed"]:
        print(f"{result['failed']} requests failed", file=sys.stderr)
        sys.exit(1)


@bench.command("latency", context_settings=EXTRA)
def latency_command(
    context: typer.Context,
    config: ConfigOption = DEFAULT_CONFIG,
    input_len: InputOption = 32,
    output_len: OutputOption = 128,
    batch_size: Annotated[int, typer.Option(help="Requests that run together.")] = 8,
    n: Annotated[int, typer.Option(help="Choices per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    warmups: Annotated[int, typer.Option("--num-iters-warmup")] = 2,
    iterations: Annotated[int, typer.Option("--num-iters")] = 10,
    detokenize: Annotated[bool, typer.Option("--detokenize/--disable-detokenize")] = True,
    output: Annotated[Path | None, typer.Option("--output", "--output-json", help="JSON file.")] = None,
) -> None:
    """The time of one batch, offline."""
    from jaxinfer.llm import LLM
    from jaxinfer.sampling_params import SamplingParams
    from serve.bench.offline import latency

    llm = LLM(EngineConfig.load(config, parse_overrides(context.args)))
    params = SamplingParams(n=n, temperature=temperature, detokenize=detokenize)
    with _rounds(warmups + iterations) as report:
        result = latency(llm, Lengths(input_len, output_len), batch_size, warmups, iterations, params, report)
    print(f"Avg latency: {result['avg_latency']} seconds")
    for percentile, seconds in result["percentiles"].items():
        print(f"{percentile}% percentile latency: {seconds} seconds")
    _save(output, result)


@contextmanager
def _rounds(total: int) -> Iterator[Callable[[int, float], None]]:
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("batches", total=total)

        def report(index: int, seconds: float) -> None:
            bar.update(task, completed=index + 1, description=f"{seconds:.3f} s")

        yield report


def _extra_body(text: str | None, temperature: float | None) -> dict[str, Any]:
    try:
        extra = json.loads(text) if text else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ValueError("--extra-body must be a JSON object")
    return extra if temperature is None else {"temperature": temperature, **extra}


def _more_limits(extra: list[str], goodput: list[str] | None) -> list[str]:
    """What follows ``--goodput ttft:200``: further limits, and nothing else."""
    unknown = [text for text in extra if not goodput or ":" not in text or text.startswith("-")]
    if unknown:
        raise ValueError(f"argument {unknown[0]!r} is not known")
    return extra


def _save(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1))
