"""Host time of a step: scheduling, building the batch, and committing results, without any device.

A simulated runner answers at once, so what is measured is what the host adds to every step. All sequences decode one
token per step; each crosses a block border every 16 steps, as in serving. Times are processor time of the thread, so
other processes on the machine count little.

    python -m benchmarks.host_overhead --output docs/images/host_overhead.png
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxinfer.batch.builder import StepArrays
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.config import CacheConfig, CompileConfig, EngineConfig, ModelConfig, SchedulerConfig
from jaxinfer.engine.build import Engine, assemble
from jaxinfer.runner.protocol import BegunStep, StepHandle
from jaxinfer.runner.simulated import CostModel, SimulatedRunner
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduler.plan import StepPlan
from jaxinfer.tokenization.chat import ChatTemplate

BLOCK_SIZE = 16
PROMPT = 64
MAX_MODEL_LEN = 4096
SIZES = (1, 8, 64, 256, 1024)


@dataclass(frozen=True)
class Measurement:
    """Milliseconds of a step.

    Attributes:
        before: median until the dispatch (schedule and build); ``after``: from there on (commit).
    """

    sequences: int
    median: float
    minimum: float
    before: float
    after: float


class TimedRunner:
    """Notes when a step is dispatched, which splits the host's time."""

    def __init__(self, inner: SimulatedRunner) -> None:
        self._inner = inner
        self.dispatched_at = 0.0

    def dispatch(self, plan: StepPlan, arrays: StepArrays) -> StepHandle:
        self.dispatched_at = time.thread_time()
        return self._inner.dispatch(plan, arrays)

    def begin(self, plan: StepPlan, arrays: StepArrays) -> BegunStep:
        self.dispatched_at = time.thread_time()
        return self._inner.begin(plan, arrays)


def make_engine(num_seqs: int, runner: TimedRunner) -> Engine:
    num_blocks = num_seqs * (MAX_MODEL_LEN // BLOCK_SIZE) + 1
    config = EngineConfig(
        model=ModelConfig(reference="simulated"),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=max(num_seqs, 2048)),
        compile=CompileConfig(cache_dir="none"),
    )
    plan = CompilePlan.make(config.scheduler, MAX_MODEL_LEN, BLOCK_SIZE, 1)
    return assemble(
        config,
        runner,
        plan,
        (num_blocks,),
        (None,),
        tokenizer=None,
        chat_template=ChatTemplate({}),
        vocab_size=32000,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(2,),
    )


def fill(engine: Engine, num_seqs: int) -> None:
    """Adds the sequences and steps until all of them decode."""
    params = SamplingParams(max_tokens=MAX_MODEL_LEN - PROMPT, ignore_eos=True, detokenize=False)
    for i in range(num_seqs):
        prompt = {"prompt_token_ids": [3 + (i * 7 + j * j) % 30000 for j in range(PROMPT)]}
        engine.core.add(engine.inputs.process(str(i), prompt, params))
    while len(engine.core.scheduler.running) < num_seqs:
        engine.core.step()
    for _ in range(5):
        engine.core.step()


def measure(num_seqs: int, steps: int) -> Measurement:
    runner = TimedRunner(SimulatedRunner(32000, CostModel()))
    engine = make_engine(num_seqs, runner)
    fill(engine, num_seqs)
    before, after = [], []
    for _ in range(steps):
        start = time.thread_time()
        engine.core.step()
        end = time.thread_time()
        before.append(1e3 * (runner.dispatched_at - start))
        after.append(1e3 * (end - runner.dispatched_at))
    total = [x + y for x, y in zip(before, after)]
    return Measurement(
        num_seqs, statistics.median(total), min(total), statistics.median(before), statistics.median(after)
    )


def print_table(results: list[Measurement]) -> None:
    table = Table("sequences", "median ms", "minimum ms", "schedule + build", "commit", "us per sequence")
    for m in results:
        numbers = (m.median, m.minimum, m.before, m.after)
        table.add_row(str(m.sequences), *(f"{x:.3f}" for x in numbers), f"{1e3 * m.median / m.sequences:.1f}")
    Console().print(table)


def plot(results: list[Measurement], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    sizes = [m.sequences for m in results]
    axes.loglog(sizes, [m.median for m in results], "o-", label="median")
    axes.loglog(sizes, [m.minimum for m in results], "s--", label="minimum")
    per_sequence = results[-1].minimum / results[-1].sequences
    axes.loglog(sizes, [per_sequence * n for n in sizes], ":", color="gray", label="linear")
    axes.set(
        xlabel="sequences that decode",
        ylabel="host time of a step, ms",
        title="Host overhead without a device",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=300, help="measured steps per size (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="write a plot here")
    arguments = parser.parse_args()
    results = [measure(size, arguments.steps) for size in SIZES]
    print_table(results)
    if arguments.output is not None:
        plot(results, arguments.output)


if __name__ == "__main__":
    main()
