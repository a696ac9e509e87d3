"""Host time of a step: scheduling, building the batch, and committing results, without any device.

A simulated runner answers at once, so what is measured is what the host adds to every step. All sequences decode one
token per step; each crosses a block border every 16 steps, as in serving. Times are processor time of the thread, so
that other processes on the machine count little; but a processor that is shared does everything more slowly for seconds
at a time. So the sizes take turns, and around each step a short loop that hardly touches memory is timed: a step is at
full speed if both loops took at most 1.2 times the fastest one. As in a server, what exists before the measurement is
frozen for the garbage collector, which stays on.

    python -m benchmarks.host_overhead --output docs/images/host_overhead.png
"""

import argparse
import gc
import math
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

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
TURN = 16
"""Steps that a size is measured at a time; in so many, every sequence crosses a block border."""

FULL_SPEED = 1.2
"""Most that the loops around a step at full speed take, in times of the fastest one."""


class Step(NamedTuple):
    """Milliseconds.

    Attributes:
        pace: of the loop before the step.
        before: until the dispatch (schedule and build); ``after``: from there on (commit).
    """

    pace: float
    before: float
    after: float

    @property
    def total(self) -> float:
        return self.before + self.after


@dataclass(frozen=True)
class Measurement:
    """Milliseconds of a step.

    Attributes:
        full_speed: median of the steps at full speed, which are the ``share`` of all; NaN if there is none.
        before, after: medians of the parts of steps at full speed.
        median, minimum: of all steps.
    """

    sequences: int
    full_speed: float
    share: float
    before: float
    after: float
    median: float
    minimum: float

    @classmethod
    def of(cls, sequences: int, steps: list[Step], fastest: float) -> Self:
        quick = [
            step
            for step, behind in zip(steps, [*steps[1:], steps[-1]])
            if max(step.pace, behind.pace) <= FULL_SPEED * fastest
        ]

        def median(values: Iterable[float]) -> float:
            return statistics.median([*values] or [math.nan])

        return cls(
            sequences,
            median(step.total for step in quick),
            len(quick) / len(steps),
            median(step.before for step in quick),
            median(step.after for step in quick),
            median(step.total for step in steps),
            min(step.total for step in steps),
        )


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


def pace() -> float:
    """Milliseconds of a loop that needs nothing but the processor."""
    start, total = time.thread_time(), 0
    for i in range(5000):
        total += i & 3
    return 1e3 * (time.thread_time() - start)


def turn(engine: Engine, runner: TimedRunner) -> list[Step]:
    steps = []
    for _ in range(TURN):
        loop = pace()
        start = time.thread_time()
        engine.core.step()
        end = time.thread_time()
        steps.append(Step(loop, 1e3 * (runner.dispatched_at - start), 1e3 * (end - runner.dispatched_at)))
    return steps


def measure(sizes: tuple[int, ...], steps: int) -> list[Measurement]:
    """Measures engines of several sizes in turns, at least so many steps each."""
    runners = {size: TimedRunner(SimulatedRunner(32000, CostModel())) for size in sizes}
    engines = {size: make_engine(size, runner) for size, runner in runners.items()}
    for size, engine in engines.items():
        fill(engine, size)
    gc.collect()
    gc.freeze()
    measured: dict[int, list[Step]] = {size: [] for size in sizes}
    for _ in range(-(-steps // TURN)):
        for size, engine in engines.items():
            measured[size] += turn(engine, runners[size])
    fastest = min(step.pace for of_size in measured.values() for step in of_size)
    return [Measurement.of(size, of_size, fastest) for size, of_size in measured.items()]


def print_table(results: list[Measurement]) -> None:
    table = Table(
        *("sequences", "full speed", "us each", "plan, build", "commit"),
        *("all steps", "us each", "minimum", "at full speed"),
        title="Host time of a step, processor milliseconds, medians",
    )
    for m in results:
        table.add_row(
            str(m.sequences),
            f"{m.full_speed:.3f}",
            f"{1e3 * m.full_speed / m.sequences:.1f}",
            f"{m.before:.3f}",
            f"{m.after:.3f}",
            f"{m.median:.3f}",
            f"{1e3 * m.median / m.sequences:.1f}",
            f"{m.minimum:.3f}",
            f"{m.share:.0%}",
        )
    Console().print(table)


def plot(results: list[Measurement], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    sizes = [m.sequences for m in results]
    axes.loglog(sizes, [m.full_speed for m in results], "o-", label="median at full speed")
    axes.loglog(sizes, [m.median for m in results], "^--", label="median of all steps")
    axes.loglog(sizes, [m.minimum for m in results], "s--", label="minimum")
    per_sequence = results[-1].full_speed / results[-1].sequences
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
    results = measure(SIZES, arguments.steps)
    print_table(results)
    if arguments.output is not None:
        plot(results, arguments.output)


if __name__ == "__main__":
    main()
