"""Pipeline parallelism without a model: stages that sleep keep each other busy, and a request is in one batch."""

import threading
from dataclasses import dataclass, field

import pytest

from jaxinfer.batch.builder import StepArrays
from jaxinfer.config import EngineConfig, ParallelConfig
from jaxinfer.engine.build import Engine
from jaxinfer.runner.simulated_pipeline import SimulatedPipeline
from jaxinfer.scheduler.plan import StepPlan
from sharding.stages import StageLine
from tests.support.engines import VOCAB, Driver, Job, build, config, ids, run, simulated, token_params
from tests.support.tiny_models import prompt_ids

STAGES = 4


def settings(**options) -> EngineConfig:
    values = {"max_num_seqs": 20, "max_num_batched_tokens": 256, "num_blocks": 400, **options}
    return config(**values).model_copy(update={"parallel": ParallelConfig(pipeline=STAGES)})


@dataclass
class Watch:
    """Notes when stages were busy, and which requests are in which batch."""

    spans: list[tuple[int, int, float, float]] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)

    def busy(self, *span) -> None:
        self.spans.append(span)

    def engine(self, seconds: float, **options) -> Engine:
        watch = self

        class Recorder(SimulatedPipeline):
            def begin(self, plan: StepPlan, arrays: StepArrays):
                watch.plans.append(plan)
                elsewhere = {row.seq for step in engine.core._in_flight for row in step.plan.rows}
                assert not elsewhere & {row.seq for row in plan.rows}
                return super().begin(plan, arrays)

        engine = build(
            lambda _: Recorder(VOCAB, [seconds] * STAGES, self.busy), settings(**options), windows=(None,)
        )
        return engine

    def overlap(self) -> float:
        """Share of the least possible time in the time that it took: all steps through the busiest stage, and the first
        one through the others."""
        per_stage = [
            [stop - start for stage, _, start, stop in self.spans if stage == i] for i in range(STAGES)
        ]
        busiest = max(per_stage, key=sum)
        fill = sum(seconds[0] for seconds in per_stage if seconds is not busiest)
        elapsed = max(stop for *_, stop in self.spans) - min(start for _, _, start, _ in self.spans)
        return (sum(busiest) + fill) / elapsed


def jobs(count: int, tokens: int) -> list[Job]:
    params = [token_params(max_tokens=tokens, ignore_eos=True, seed=i, temperature=1.0) for i in range(count)]
    return [Job(ids(prompt_ids(5 + i % 9, i)), params[i]) for i in range(count)]


@pytest.mark.feature("pipeline parallel", "continuous batching")
def test_four_sleeping_stages_are_busy_all_the_time() -> None:
    watch = Watch()
    run(watch.engine(0.03), jobs(20, 10), check=False)
    assert watch.overlap() >= 0.9
    assert len(watch.plans) >= 45


@pytest.mark.feature("pipeline parallel", "chunked prefill", "preemption", "prefix cache")
@pytest.mark.parametrize("options", [{}, {"chunk_size": 3, "num_blocks": 24}, {"overlap": 0}], ids=str)
def test_a_request_is_in_one_batch_and_gets_the_tokens_of_one_device(options) -> None:
    watch = Watch()
    engine = watch.engine(0.0, **options)
    outputs = run(engine, jobs(14, 9))
    alone = run(simulated(config(max_num_seqs=20, num_blocks=400)), jobs(14, 9))
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone]
    batches = STAGES + engine.config.scheduler.overlap
    assert max(len(plan.rows) for plan in watch.plans) == -(-14 // batches)
    assert "num_blocks" not in options or engine.core.stats.preemptions > 0


@pytest.mark.feature("pipeline parallel", "abort")
def test_aborted_requests_leave_the_pipeline() -> None:
    driver = Driver(Watch().engine(0.001))
    for i, job in enumerate(jobs(12, 30)):
        driver.add(str(i), job.prompt, job.params)
    driver.step(9)
    for i in range(0, 12, 2):
        driver.abort(str(i))
    driver.drain()
    assert [driver.finishes(str(i)) for i in range(4)] == [["abort"], ["length"], ["abort"], ["length"]]


def test_an_error_in_a_stage_reaches_whoever_waits() -> None:
    def second(value: int) -> int:
        if value == 2:
            raise RuntimeError("out of memory")
        return value

    line = StageLine([lambda value: value + 1, second])
    futures = [line.submit(value) for value in (0, 1, 2)]
    assert futures[0].result(5) == 1
    with pytest.raises(RuntimeError, match="out of memory"):
        futures[1].result(5)
    assert futures[2].result(5) == 3


def test_the_threads_end_with_the_line() -> None:
    before = set(threading.enumerate())
    line = StageLine([lambda value: value + 1, lambda value: value * 2])
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    assert line.submit(1).result(5) == 4
    del line
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
