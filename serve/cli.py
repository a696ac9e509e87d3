"""The command line: text on stdout, everything else on stderr."""

import asyncio
import dataclasses
import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.config import EngineConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.hosts.environment import resolve_hosts
from jaxinfer.outputs import Logprob
from jaxinfer.request import RequestError
from serve.bench.cli import bench
from serve.overrides import parse_overrides

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="LLM inference on JAX. Any configuration value can be overridden: --cache.num-blocks 512.",
)
app.add_typer(bench, name="bench")
stderr = Console(stderr=True)

DEFAULT_CONFIG = "configs/smollm2-135m.yaml"
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
ConfigOption = Annotated[str, typer.Option("--config", help="YAML file or model reference.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", help="Log what the engine decides.")]


def main() -> None:
    """Runs the command line; errors of the user are one message, not a traceback."""
    try:
        app()
    except (ConfigError, CheckpointError, RequestError, ValueError) as error:
        stderr.print(f"[red]error:[/red] {error}", highlight=False, markup=True, soft_wrap=True)
        sys.exit(2)


@app.command(context_settings=OVERRIDES)
def generate(
    context: typer.Context,
    prompt: Annotated[list[str], typer.Option("--prompt", help="Repeatable: all prompts run in one batch.")],
    config: ConfigOption = DEFAULT_CONFIG,
    as_chat: Annotated[bool, typer.Option("--chat", help="Render each prompt as a user message.")] = False,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | None = None,
    n: int = 1,
    max_tokens: int | None = 128,
    stop: Annotated[list[str] | None, typer.Option("--stop")] = None,
    ignore_eos: bool = False,
    logprobs: int | None = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per prompt: ids, text, logprobs.")
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Generate text for one or more prompts."""
    from jaxinfer.llm import LLM
    from jaxinfer.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        n=n,
        max_tokens=max_tokens,
        stop=stop or (),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    # One answer needs few of the programs: compile those, unless the user asks for all.
    llm = LLM(_load(config, context.args, verbose, {"compile.warm_up": "lazy"}))
    if as_chat:
        outputs = llm.chat([[{"role": "user", "content": text}] for text in prompt], params)
    else:
        outputs = llm.generate(list(prompt), params)
    for output in outputs:
        if as_json:
            print(json.dumps(as_json_value(dataclasses.asdict(output))))
        else:
            for choice in output.outputs:
                print(choice.text)


@app.command(context_settings=OVERRIDES)
def chat(
    context: typer.Context,
    config: ConfigOption = DEFAULT_CONFIG,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    temperature: float = 0.7,
    top_p: float = 0.95,
    seed: int | None = None,
    max_tokens: int | None = None,
    verbose: VerboseOption = False,
) -> None:
    """Talk to a model; answers are streamed."""
    from serve.chat import chat as talk
    from serve.chat import chat_params

    params = chat_params(temperature, top_p, seed, max_tokens)
    asyncio.run(talk(_load(config, context.args, verbose), params, system))


@app.command(name="serve", context_settings=OVERRIDES)
def serve_command(
    context: typer.Context,
    config: Annotated[str | None, typer.Option("--config", help="YAML file.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model reference.")] = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="0: any free one.")] = None,
    shutdown_timeout: Annotated[
        float | None, typer.Option("--shutdown-timeout", help="Seconds that requests get after SIGTERM.")
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option("--replicas", help="ray: several replicas on Ray Serve; see docs/replicas.md."),
    ] = None,
    verbose: VerboseOption = False,
) -> None:
    """Serve a model over HTTP with OpenAI's API, until SIGTERM or Ctrl-C."""
    given = {
        "model.reference": model if config is not None else None,
        "server.host": host,
        "server.port": port,
        "server.shutdown_timeout": shutdown_timeout,
    }
    overrides = {key: value for key, value in given.items() if value is not None}
    if replicas is not None:
        _serve_replicas(replicas, config or model or DEFAULT_CONFIG, context.args, verbose, overrides)
    settings = _load(config or model or DEFAULT_CONFIG, context.args, verbose, overrides=overrides)
    settings = resolve_hosts(settings, os.environ)
    if settings.hosts.follows:
        from serve.follow import follow

        follow(settings)
    from serve.run import serve

    sys.exit(serve(settings))


def _serve_replicas(
    kind: str, source: str, extra: list[str], verbose: bool, overrides: dict[str, Any]
) -> NoReturn:
    if kind != "ray":
        raise ConfigError(f"--replicas: {kind!r} is not known; allowed is ray")
    _log(verbose)
    from serve.replicas.run import load, serve_replicas

    sys.exit(serve_replicas(load(source, {**parse_overrides(extra), **overrides})))


@app.command(context_settings=OVERRIDES)
def launch(
    context: typer.Context,
    hosts: Annotated[int, typer.Option("--hosts", min=2, help="Processes, each with its own devices.")],
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, help="Times in a row that all are replaced.")
    ] = 5,
) -> None:
    """Serve a model with several processes of this machine, as several hosts would; for tests. All other options are
    those of `serve`. If a process ends, all are replaced."""
    from serve.launch import launch as start

    if any(argument.split("=")[0] == "--replicas" for argument in context.args):
        raise ConfigError(
            "--replicas: an engine of several processes cannot be a replica; allowed is `serve`"
        )
    _log(verbose=True)
    sys.exit(start(hosts, restarts, context.args))


@app.command(context_settings=OVERRIDES)
def plan(
    context: typer.Context,
    config: ConfigOption = DEFAULT_CONFIG,
    model: Annotated[
        str | None, typer.Option("--model", help="Model reference, or a known name such as llama-3-70b.")
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="a100, l4, h100, h200 or b200.")] = None,
    load: Annotated[
        str | None, typer.Option("--load", help="'rate=100, prompt=1500, output=300, ttft=1s, tpot=50ms'")
    ] = None,
    use: Annotated[
        str, typer.Option("--use", help="Techniques: 'weights=fp8, prefix_hits=0.5, drafts=3, accepted=2.2'")
    ] = "",
    layout: Annotated[str, typer.Option("--layout", help="'tensor=8, pipeline=2'; else the best.")] = "",
    by_data: Annotated[
        bool,
        typer.Option("--attention-by-data", help="Devices have sequences of their own; not in the engine."),
    ] = False,
    assume: Annotated[str, typer.Option("--assume", help="Other assumptions: 'link_latency=8us'")] = "",
    compare: Annotated[bool, typer.Option("--compare", help="With and without each technique.")] = False,
    sweep: Annotated[Path | None, typer.Option("--sweep", help="PNG to write.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    verbose: VerboseOption = False,
) -> None:
    """Show shape buckets, programs and memory of a configuration; with --load, how many GPUs a load takes."""
    if load is None:
        if any((model, gpu, use, layout, by_data, assume, compare, sweep, as_json)):
            raise ValueError("--model, --gpu and the options behind them belong to --load; give --load")
        from serve.plan import print_plan

        print_plan(_load(config, context.args, verbose))
        return
    if model is None or gpu is None or context.args:
        stray = f", not {' '.join(context.args)}" if context.args else ""
        raise ValueError(f"--load needs --model and --gpu{stray}")
    from serve.capacity.report import run
    from serve.capacity.request import Options

    _log(verbose)
    run(Options(model, gpu, load, use, layout, assume, by_data, sweep, compare, as_json))


@app.command(context_settings=OVERRIDES)
def convert(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", help="New directory for the checkpoint.")],
    config: ConfigOption = DEFAULT_CONFIG,
    verbose: VerboseOption = False,
) -> None:
    """Write a model as a checkpoint of our own (Orbax), which loads faster."""
    from serve.convert import convert as write

    write(_load(config, context.args, verbose), output)


@app.command(name="verify-spec", context_settings=OVERRIDES)
def verify_spec(
    context: typer.Context,
    config: Annotated[
        str | None,
        typer.Option(
            "--config", help="YAML file or model reference: run this model with and without drafts too."
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Sequences of each sampled cell; 0: exact laws only.")
    ] = 20_000,
    sequences: Annotated[int, typer.Option(help="Samples of the real model, each way.")] = 200,
    seed: Annotated[int, typer.Option(help="Of models, drafts and samples.")] = 0,
    plot: Annotated[Path | None, typer.Option("--plot", help="PNG to write.")] = None,
    verbose: VerboseOption = False,
) -> None:
    """Check that speculative decoding emits exactly the law of the model; fails if a law differs."""
    settings = None
    if config is not None:
        settings = _load(config, context.args, verbose, {"compile.warm_up": "lazy"})
    elif context.args:
        raise ValueError(f"{' '.join(context.args)}: configuration values belong to a model; give --config")
    from serve.verify_spec import verify

    sys.exit(verify(samples, seed, plot, settings, sequences))


@app.command()
def train_draft(
    method: Annotated[str, typer.Option("--method", help="medusa, eagle or eagle3.")],
    config: Annotated[Path, typer.Option("--config", help="YAML file with the recipe.")],
    output: Annotated[str | None, typer.Option("--output", help="Directory, if not the recipe's.")] = None,
    verbose: VerboseOption = False,
) -> None:
    """Train a draft head for a model; the result can be served as speculative.drafter."""
    from serve.train_draft import train_draft as train

    _log(verbose)
    train(method, config, output)


@app.command()
def models() -> None:
    """List the model architectures that can be loaded."""
    from jaxinfer.models.registry import FAMILIES

    table = Table("architecture", "module")
    for name, entry in sorted(FAMILIES.items()):
        table.add_row(name, entry.parse.__module__)
    Console().print(table)


def as_json_value(value: Any) -> Any:
    """Turns what outputs are made of into JSON values; log-probabilities become objects with names."""
    if isinstance(value, Logprob):
        return value._asdict()
    if isinstance(value, dict):
        return {str(key): as_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json_value(item) for item in value]
    return value


def _load(
    config: str,
    extra: list[str],
    verbose: bool,
    defaults: dict[str, Any] | None = None,
    overrides: dict[str, Any] | None = None,
) -> EngineConfig:
    """Reads the configuration; ``defaults`` are this command's, and weaker than what the user sets. ``overrides`` come
    from options that have a short name."""
    _log(verbose)
    return EngineConfig.load(config, {**parse_overrides(extra), **(overrides or {})}, defaults)


def _log(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, stream=sys.stderr, format="%(message)s"
    )
