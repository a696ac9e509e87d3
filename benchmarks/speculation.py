"""Speculation off, fixed and adaptive on a real model, at several batch sizes: tokens per second and what was accepted.

    python -m benchmarks.speculation --config configs/smollm2-135m.yaml --batches 1 4 16 32
    python -m benchmarks.speculation --config TARGET --drafter model --draft-model DRAFT --max-drafts 4 --task code

The engines stand side by side and take turns, so that other load on the machine falls on all of them. Tasks: ``mixed``
(half of the prompts ask for a copy of a text, half for something new), ``rewrite`` (a text with one word changed, until
the answer ends) and ``code`` (ten small programs). Prints a table, and writes a plot with ``--plot`` and its figures
beside it.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.speculation_tasks import TASKS, conversations, ignores_end
from jaxinfer.config import EngineConfig
from jaxinfer.llm import LLM
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams


@dataclass(frozen=True)
class Turn:
    """One run of one engine: seconds by the clock and of the processor, and what speculation did.

    Attributes:
        tpot: seconds per output token behind the first one of its request, on average: without the prompts.
    """

    seconds: float
    cpu_seconds: float
    tpot: float
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


def take_turn(llm: LLM, task: str, batch: int, requests: int, tokens: int) -> Turn:
    stats = llm.engine.core.stats
    before = (stats.steps, stats.drafted_tokens, stats.accepted_tokens)
    started, cpu = time.perf_counter(), time.process_time()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=ignores_end(task))
    outputs = [
        o for some in conversations(task, batch, requests) for o in llm.chat(some, params, progress=False)
    ]
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    after = (stats.steps, stats.drafted_tokens, stats.accepted_tokens)
    steps, drafted, accepted = (b - a for a, b in zip(before, after))
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    return Turn(seconds, cpu, _tpot(outputs), count, steps, drafted, accepted)


def _tpot(outputs: list[RequestOutput]) -> float:
    seconds, tokens = 0.0, 0
    for output in outputs:
        metrics = output.metrics
        assert metrics is not None
        assert metrics.finished_time is not None
        assert metrics.first_token_time is not None
        seconds += metrics.finished_time - metrics.first_token_time
        tokens += len(output.outputs[0].token_ids) - 1
    return seconds / tokens


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
        "batch",
        "speculation",
        "tok/s",
        "times off",
        "by processor time",
        "between tokens",
        "accepted",
        "tokens per pass",
    )
    for (batch, name), turn in best.items():
        off = best[batch, "off"]
        table.add_row(
            str(batch),
            name,
            f"{turn.tokens / turn.seconds:.1f}",
            f"{off.seconds / turn.seconds:.2f}",
            f"{off.cpu_seconds / turn.cpu_seconds:.2f}",
            f"{off.tpot / turn.tpot:.2f}",
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
