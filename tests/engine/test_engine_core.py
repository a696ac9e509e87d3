"""The step loop: counters, metrics, and failures of the runner."""

import pytest

from jaxinfer.request import FinishReason, QueueFullError
from jaxinfer.runner.simulated import CostModel, SimulatedRunner
from tests.support import engines
from tests.support.engines import (
    VOCAB,
    Driver,
    Job,
    assert_clean,
    config,
    ids,
    one_hot,
    run,
    scripted,
    simulated,
    token_params,
)


def params(max_tokens: int = 5, **values):
    return token_params(
        **{"max_tokens": max_tokens, "ignore_eos": True, "temperature": 1.0, "seed": 1, **values}
    )


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_idle_engine_has_no_work(overlap):
    engine = simulated(config(overlap=overlap))
    assert not engine.core.has_work
    assert engine.core.step() == []


@pytest.mark.parametrize("overlap", [0, 1])
def test_overlap_commits_one_step_late(overlap):
    driver = Driver(simulated(config(overlap=overlap)))
    driver.add("r", ids([1, 2]), params(3))
    news = [len(driver.step()) for _ in range(3 + overlap)]
    assert news == [0] * overlap + [1, 1, 1]
    driver.drain()


@pytest.mark.parametrize("overlap", [0, 1])
def test_ops_04_counters_of_every_way_to_end(overlap):
    """Aborted requests count like others, refused ones do not; preemption is no prefix hit; usage falls to 0."""

    def script(request, index, position):
        row = one_hot(65)
        if request.request_id == "fails":
            row[:] = float("nan")
        return row

    engine = scripted(script, config(overlap=overlap, max_waiting_seqs=8, max_num_seqs=4))
    stats, driver = engine.core.stats, Driver(engine)
    for i in range(4):
        driver.add(f"n{i}", ids([10 + i] * 5), token_params(max_tokens=3))
    driver.add("fails", ids([20] * 5), token_params(max_tokens=3))
    driver.add("waiting", ids([30] * 5), token_params(max_tokens=3))
    driver.abort("waiting")
    driver.drain()
    for i in range(8):
        driver.add(f"m{i}", ids([40 + i] * 5), token_params(max_tokens=30))
    with pytest.raises(QueueFullError):
        driver.add("refused", ids([1]), token_params())
    driver.step(4)
    for i in range(8):
        driver.abort(f"m{i}")
    driver.drain()
    assert stats.finished_by_reason == {FinishReason.LENGTH: 4, FinishReason.ERROR: 1, FinishReason.ABORT: 9}
    assert stats.prompt_tokens == 5 * (4 + 1 + 1 + 8)
    assert stats.prefix_hit_tokens == 0
    assert engine.core.scheduler.kv.usage == 0
    assert engine.core.num_requests == 0


def test_ops_04_recomputation_is_no_prefix_hit():
    engine = simulated(config(num_blocks=9, max_num_seqs=3))
    jobs = [Job(ids([i] * 6), params(12)) for i in range(5)]
    outputs = run(engine, jobs)
    assert engine.core.stats.preemptions > 0
    assert engine.core.stats.preemptions == sum(o.metrics.num_preemptions for o in outputs if o.metrics)
    assert engine.core.stats.prefix_hit_tokens == 0
    assert engine.core.stats.generated_tokens == 5 * 12


def test_computed_and_padded_tokens_add_up_to_the_buckets():
    engine = simulated(config())
    run(engine, [Job(ids(range(9)), params(4))])
    stats = engine.core.stats
    assert stats.computed_tokens == 9 + 3
    assert stats.computed_tokens + stats.padded_tokens == 16 + 3 * engine.plan.tokens(1)
    assert stats.steps == 4


def test_metrics_are_in_order():
    engine = simulated(config(), CostModel(base=0.001))
    (output,) = run(engine, [Job(ids(range(9)), params(4))])
    m = output.metrics
    assert m is not None
    assert m.first_scheduled_time is not None
    assert m.first_token_time is not None
    assert m.finished_time is not None
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time


def test_requests_that_never_ran_have_no_times():
    driver = Driver(simulated(config()))
    driver.add("r", ids([1]), params())
    driver.abort("r")
    driver.drain()
    metrics = driver.output("r").metrics
    assert metrics is not None
    assert metrics.first_scheduled_time is None
    assert metrics.first_token_time is None


def test_cached_tokens_are_those_of_the_first_admission():
    """A request that is preempted and comes back on its own blocks does not report them as hits."""
    engine = simulated(config(max_num_seqs=1, policy="priority"))
    driver = Driver(engine)
    driver.add("r", ids(range(9)), params(8), priority=5)
    driver.step(4)
    driver.add("urgent", ids([1, 2]), params(2), priority=0)
    driver.drain()
    output = driver.output("r")
    assert output.metrics is not None
    assert output.metrics.num_preemptions == 1
    assert output.num_cached_tokens == 0


def test_a_request_id_is_live_once():
    driver = Driver(simulated(config()))
    driver.add("r", ids([1]), params())
    with pytest.raises(AssertionError, match="twice"):
        driver.add("r", ids([1]), params())
    driver.drain()


class Failing:
    """Fails once, at a given step."""

    def __init__(self, step: int) -> None:
        self._inner = SimulatedRunner(VOCAB, CostModel())
        self._left = step

    def dispatch(self, plan, arrays):
        self._left -= 1
        if self._left == -1:
            raise RuntimeError("the device is gone")
        return self._inner.dispatch(plan, arrays)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_everything_can_be_ended_after_a_failed_step(step, overlap):
    """The state of the host survives an error of the runner: aborts free everything."""
    engine = engines.build(lambda _: Failing(step), config(overlap=overlap))
    driver = Driver(engine)
    for i in range(6):
        driver.add(str(i), ids([i] * 9), params(12))
    with pytest.raises(RuntimeError, match="gone"):
        driver.step(step + 1)
    for i in range(6):
        driver.abort(str(i))
    driver.drain()
    assert_clean(engine)
    assert all(driver.finishes(str(i)) == ["abort"] for i in range(6))
