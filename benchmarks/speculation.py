"""Speculation off, fixed and adaptive on a real model, at several batch sizes: tokens per second and what was accepted.

    python -m benchmarks.speculation --config configs/smollm2-135m.yaml --batches 1 4 16 32

The engines stand side by side and take turns, so that other load on the machine falls on all of them. Half of the
prompts ask for a copy of a text, half for something new. Prints a table, and writes a plot with ``--plot``.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxinfer.config import EngineConfig
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams

TEXT = (
    "The river rises in the hills above the town and runs through three lakes before it reaches the sea. "
    "In spring the water is high and the mills along its banks work day and night. Item {n}."
)
NEW = "Write a short story about a lighthouse keeper and number {n}."


@dataclass(frozen=True)
class Turn:
    """One run of one engine: seconds by the clock and of the processor, and what speculation did."""

    seconds: float
    cpu_seconds: float
    tokens: int
    steps: int
    drafted: int
    accepted: int


def modes(drafter: str) -> dict[str, dict[str, object]]:
    return {
        "off": {},
        drafter: {"speculative.drafter": drafter},
        f"{drafter}, adaptive": {"speculative.drafter": drafter, "speculative.adaptive": True},
    }


def conversations(batch: int) -> list[list[dict[str, str]]]:
    """Half copies, half stories; one request copies."""
    return [
        [
            {
                "role": "user",
                "content": f"Repeat this text word for word: {TEXT.format(n=i)}"
                if i % 2 == 0
                else NEW.format(n=i),
            }
        ]
        for i in range(batch)
    ]


def take_turn(llm: LLM, batch: int, tokens: int) -> Turn:
    stats = llm.engine.core.stats
    before = (stats.steps, stats.drafted_tokens, stats.accepted_tokens)
    started, cpu = time.perf_counter(), time.process_time()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.chat(conversations(batch), params, progress=False)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    after = (stats.steps, stats.drafted_tokens, stats.accepted_tokens)
    steps, drafted, accepted = (b - a for a, b in zip(before, after))
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    return Turn(seconds, cpu, count, steps, drafted, accepted)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/smollm2-135m.yaml")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", choices=("full", "lazy"), default="full")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    base = {"cache.prefix_caching": False, "compile.warm_up": options.warm_up, "cache.memory": "512MiB"}
    engines = {
        name: LLM(EngineConfig.load(options.config, {**base, **values}))
        for name, values in modes(options.drafter).items()
    }
    best: dict[tuple[int, str], Turn] = {}
    for batch in options.batches:
        for round_ in range(options.rounds + 1):  # the first one warms up
            for name, llm in engines.items():
                turn = take_turn(llm, batch, options.tokens)
                known = best.get((batch, name))
                if round_ and (known is None or turn.cpu_seconds < known.cpu_seconds):
                    best[batch, name] = turn
    Console().print(_table(best))
    if options.plot is not None:
        _plot(best, options.plot)


def _table(best: dict[tuple[int, str], Turn]) -> Table:
    table = Table("batch", "speculation", "tok/s", "processor s", "of off", "steps", "drafted", "accepted")
    for (batch, name), turn in best.items():
        table.add_row(
            str(batch),
            name,
            f"{turn.tokens / turn.seconds:.1f}",
            f"{turn.cpu_seconds:.2f}",
            f"{best[batch, 'off'].cpu_seconds / turn.cpu_seconds:.2f}",
            *(str(n) for n in (turn.steps, turn.drafted, turn.accepted)),
        )
    return table


def _plot(best: dict[tuple[int, str], Turn], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    batches = sorted({batch for batch, _ in best})
    for name in dict.fromkeys(name for _, name in best):
        speed = [best[b, "off"].cpu_seconds / best[b, name].cpu_seconds for b in batches]
        axis.plot(batches, speed, "o-", label=name)
    axis.set(xlabel="requests together", ylabel="speed-up by processor time", xscale="log")
    axis.set_xticks(batches, [str(b) for b in batches])
    axis.grid(alpha=0.3)
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")


if __name__ == "__main__":
    main()
