"""Speculation off, fixed and adaptive on a real model, at several batch sizes: tokens per second and what was accepted.

    python -m benchmarks.speculation --config configs/smollm2-135m.yaml --batches 1 4 16 32
    python -m benchmarks.speculation --config TARGET --drafter model --draft-model DRAFT --max-drafts 4 --task code

The engines stand side by side and take turns, so that other load on the machine falls on all of them. Tasks: ``mixed``
(half of the prompts ask for a copy of a text, half for something new), ``rewrite`` (a text with one word changed) and
``code`` (ten small programs). Prints a table, and writes a plot with ``--plot`` and its figures beside it.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
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
REWRITE = "Write this text again, with 'valley' instead of 'town' and nothing else changed: {text}"
CODE = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a Python function that checks whether a string is a palindrome.",
    "Write a Python class for a stack with push, pop and peek.",
    "Write a Python function that merges two sorted lists.",
    "Write a Python function that counts the words of a text file.",
    "Write a Python implementation of binary search.",
    "Write a Python function that flattens a nested list.",
    "Write a Python function that reads a CSV file and sums a column.",
    "Write a Python decorator that measures the time of a call.",
    "Write a Python function that finds all prime numbers below n.",
)
TASKS = ("mixed", "rewrite", "code")


@dataclass(frozen=True)
class Turn:
    """One run of one engine: seconds by the clock and of the processor, and what speculation did."""

    seconds: float
    cpu_seconds: float
    tokens: int
    steps: int
    drafted: int
    accepted: int

    @property
    def tokens_per_pass(self) -> float:
        """Of one sequence: every token that was not an accepted draft took a pass of the target."""
        return self.tokens / (self.tokens - self.accepted)


def modes(options: argparse.Namespace) -> dict[str, dict[str, object]]:
    drafter = options.drafter
    fixed = {"speculative.drafter": drafter, "speculative.max_drafts": options.max_drafts}
    if options.draft_model:
        fixed["speculative.model"] = options.draft_model
    return {"off": {}, drafter: fixed, f"{drafter}, adaptive": {**fixed, "speculative.adaptive": True}}


def question(task: str, n: int) -> str:
    """The n-th request of a task."""
    if task == "code":
        return CODE[n % len(CODE)]
    if task == "rewrite":
        return REWRITE.format(text=TEXT.format(n=n))
    return NEW.format(n=n) if n % 2 else f"Repeat this text word for word: {TEXT.format(n=n)}"


def conversations(task: str, batch: int, requests: int) -> list[list[list[dict[str, str]]]]:
    """The requests of a turn, in batches."""
    every = [[{"role": "user", "content": question(task, n)}] for n in range(max(batch, requests))]
    return [every[first : first + batch] for first in range(0, len(every), batch)]


def take_turn(llm: LLM, task: str, batch: int, requests: int, tokens: int) -> Turn:
    stats = llm.engine.core.stats
    before = (stats.steps, stats.drafted_tokens, stats.accepted_tokens)
    started, cpu = time.perf_counter(), time.process_time()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    outputs = [
        o for some in conversations(task, batch, requests) for o in llm.chat(some, params, progress=False)
    ]
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
    parser.add_argument("--draft-model", help="speculative.model, for drafters that have one")
    parser.add_argument("--max-drafts", type=int, default=8)
    parser.add_argument("--task", choices=TASKS, default="mixed")
    parser.add_argument("--requests", type=int, default=1, help="at least so many, one batch after the other")
    parser.add_argument(
        "--setting", nargs="*", default=[], help="KEY=VALUE of the configuration, for all engines"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", choices=("full", "lazy"), default="full")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    base = {"cache.prefix_caching": False, "compile.warm_up": options.warm_up, "cache.memory": "512MiB"}
    base |= dict(setting.split("=", 1) for setting in options.setting)
    engines = {
        name: LLM(EngineConfig.load(options.config, {**base, **values}))
        for name, values in modes(options).items()
    }
    best: dict[tuple[int, str], Turn] = {}
    for batch in options.batches:
        for round_ in range(options.rounds + 1):  # the first one warms up
            for name, llm in engines.items():
                turn = take_turn(llm, options.task, batch, options.requests, options.tokens)
                known = best.get((batch, name))
                if round_ and (known is None or turn.seconds < known.seconds):
                    best[batch, name] = turn
    Console(width=120).print(_table(best))
    if options.plot is not None:
        _plot(best, options.plot)
        record = [{"batch": b, "speculation": name, **asdict(turn)} for (b, name), turn in best.items()]
        options.plot.with_suffix(".json").write_text(json.dumps(record, indent=1))


def _table(best: dict[tuple[int, str], Turn]) -> Table:
    table = Table(
        "batch", "speculation", "tok/s", "times off", "by processor time", "accepted", "tokens per pass"
    )
    for (batch, name), turn in best.items():
        off = best[batch, "off"]
        table.add_row(
            str(batch),
            name,
            f"{turn.tokens / turn.seconds:.1f}",
            f"{off.seconds / turn.seconds:.2f}",
            f"{off.cpu_seconds / turn.cpu_seconds:.2f}",
            f"{turn.accepted} of {turn.drafted}",
            f"{turn.tokens_per_pass:.2f}",
        )
    return table


def _plot(best: dict[tuple[int, str], Turn], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    batches = sorted({batch for batch, _ in best})
    for name in dict.fromkeys(name for _, name in best):
        speed = [best[b, "off"].seconds / best[b, name].seconds for b in batches]
        axis.plot(batches, speed, "o-", label=name)
    axis.set(xlabel="requests together", ylabel="times the speed without", xscale="log")
    axis.set_xticks(batches, [str(b) for b in batches])
    axis.grid(alpha=0.3)
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")


if __name__ == "__main__":
    main()
