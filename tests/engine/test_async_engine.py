"""Streams of the AsyncEngine: cancellation, ids in use, slow readers, failure."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from jaxinfer.engine.async_engine import AsyncEngine, EngineDeadError
from jaxinfer.outputs import RequestOutput
from jaxinfer.request import QueueFullError, RequestError
from jaxinfer.runner.protocol import Runner, StepHandle
from jaxinfer.runner.simulated import CostModel, SimulatedRunner
from jaxinfer.sampling_params import OutputKind, SamplingParams
from tests.support import engines
from tests.support.engines import VOCAB, assert_clean, config, ids, simulated, token_params

pytestmark = pytest.mark.feature("AsyncEngine")

FAST = CostModel(base=0.0005)


def params(max_tokens: int = 5, **values) -> SamplingParams:
    return token_params(
        **{"max_tokens": max_tokens, "ignore_eos": True, "seed": 1, "temperature": 1.0, **values}
    )


def drive(
    scenario: Callable[[AsyncEngine], Awaitable[None]], cost: CostModel = FAST, **settings
) -> AsyncEngine:
    """Runs a scenario against an engine, waits until it is idle, and checks that nothing leaked."""
    engine = AsyncEngine(simulated(config(**settings), cost))

    async def main() -> None:
        async with engine:
            await asyncio.wait_for(scenario(engine), 20)
            await idle(engine)

    asyncio.run(main())
    assert engine.client.num_requests == 0
    assert_clean(engine.engine)
    return engine


async def idle(engine: AsyncEngine) -> None:
    for _ in range(2000):
        if engine.client.loop.idle and not engine.engine.core.has_work:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the engine is still busy")


async def collect(engine: AsyncEngine, *args, **kwargs) -> list[RequestOutput]:
    return [output async for output in engine.generate(*args, **kwargs)]


class FailingRunner:
    """Works for some steps, then raises.

    Args:
        halfway: what the second half of the steps waits for.
    """

    def __init__(self, steps: int, halfway: threading.Event | None) -> None:
        self._inner: Runner = SimulatedRunner(VOCAB, FAST)
        self._left = steps
        self._gate_at = steps // 2
        self._halfway = halfway

    def dispatch(self, plan, arrays) -> StepHandle:
        if self._halfway is not None and self._left == self._gate_at:
            self._halfway.wait(10)
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the device is gone")
        return self._inner.dispatch(plan, arrays)


def failing(steps: int, halfway: threading.Event | None = None) -> AsyncEngine:
    return AsyncEngine(engines.build(lambda _: FailingRunner(steps, halfway), config()))


def test_outputs_of_concurrent_requests():
    async def scenario(engine: AsyncEngine) -> None:
        results = await asyncio.gather(*(collect(engine, ids([i, i]), params(6)) for i in range(10)))
        alone = [await collect(engine, ids([i, i]), params(6)) for i in range(10)]
        for together, single in zip(results, alone):
            assert together[-1].outputs[0].token_ids == single[-1].outputs[0].token_ids
            assert together[-1].finished
            assert sum(output.finished for output in together) == 1
            lengths = [len(output.outputs[0].token_ids) for output in together]
            assert lengths == sorted(set(lengths))

    drive(scenario)


def test_deltas_add_up():
    async def scenario(engine: AsyncEngine) -> None:
        whole = await collect(engine, ids([1]), params(20))
        pieces = await collect(engine, ids([1]), params(20, output_kind=OutputKind.DELTA))
        joined = [token for output in pieces for token in output.outputs[0].token_ids]
        assert joined == whole[-1].outputs[0].token_ids

    drive(scenario)


def test_invalid_requests_are_refused_before_they_are_queued():
    async def scenario(engine: AsyncEngine) -> None:
        for prompt, values in ((ids([]), {}), (ids([VOCAB]), {}), (ids([1]), {"stop_token_ids": [VOCAB]})):
            with pytest.raises(RequestError):
                await collect(engine, prompt, params(**values))
        assert (await collect(engine, ids([VOCAB - 1]), params()))[-1].finished

    drive(scenario)


def test_a_full_queue_refuses_without_a_trace():
    async def scenario(engine: AsyncEngine) -> None:
        results = await asyncio.gather(
            *(collect(engine, ids([i]), params(50)) for i in range(20)), return_exceptions=True
        )
        refused = [r for r in results if isinstance(r, QueueFullError)]
        served = [r for r in results if isinstance(r, list)]
        assert len(refused) + len(served) == 20
        assert refused
        assert all(r[-1].outputs[0].finish_reason == "length" for r in served)

    drive(scenario, max_waiting_seqs=2, max_num_seqs=2)


def test_a_request_id_in_use_is_refused_and_free_again_afterwards():
    async def scenario(engine: AsyncEngine) -> None:
        async with aclosing(engine.generate(ids([1]), params(50), request_id="x")) as stream:
            await anext(stream)
            with pytest.raises(RequestError, match="in use"):
                await collect(engine, ids([2]), params(), request_id="x")
            assert not (await anext(stream)).finished, "the first one goes on"
        for _ in range(20):
            outputs = await collect(engine, ids([2]), params(3), request_id="x")
            assert outputs[-1].outputs[0].finish_reason == "length"

    drive(scenario)


def test_an_id_taken_over_right_after_a_cancellation():
    """Neither the abort nor late news of the first request reach the second one of the same id."""

    async def scenario(engine: AsyncEngine) -> None:
        for _ in range(30):
            async with aclosing(engine.generate(ids([1]), params(50), request_id="x")) as stream:
                await anext(stream)
            outputs = await collect(engine, ids([2]), params(3), request_id="x")
            assert {output.request_id for output in outputs} == {"x"}
            assert outputs[-1].outputs[0].finish_reason == "length"
            assert len(outputs[-1].outputs[0].token_ids) == 3

    drive(scenario)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_sch_07_leaving_the_iteration_aborts(taken):
    async def scenario(engine: AsyncEngine) -> None:
        async with aclosing(engine.generate(ids([1]), params(50, n=3))) as stream:
            for _ in range(taken):
                await anext(stream)
        await idle(engine)
        assert engine.engine.core.stats.generated_tokens < 3 * 50 / 2

    drive(scenario, CostModel(base=0.003))


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.01])
def test_sch_07_cancelling_the_consumer_aborts(delay):
    async def scenario(engine: AsyncEngine) -> None:
        others = [asyncio.create_task(collect(engine, ids([i]), params(30))) for i in range(3)]
        for round_ in range(20):
            task = asyncio.create_task(collect(engine, ids([7]), params(60), request_id=f"c{round_}"))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        for other in others:
            assert (await other)[-1].outputs[0].finish_reason == "length"

    drive(scenario, CostModel(base=0.003))


def test_abort_by_id_gives_a_last_output():
    async def scenario(engine: AsyncEngine) -> None:
        outputs = []
        async for output in engine.generate(ids([1]), params(60), request_id="x"):
            outputs.append(output)
            await engine.abort("x")
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert sum(o.finished for o in outputs) == 1
        await engine.abort("x")
        await engine.abort("unknown")

    drive(scenario, CostModel(base=0.003))


def test_normal_ends_are_no_aborts():
    async def scenario(engine: AsyncEngine) -> None:
        for i in range(30):
            await collect(engine, ids([i]), params(2))

    engine = drive(scenario)
    assert {reason.value: n for reason, n in engine.engine.core.stats.finished_by_reason.items()} == {
        "length": 30
    }


def test_ops_01_a_slow_reader_holds_one_merged_output():
    """What is not read merges: the next output holds all that is new, and nobody else waits."""

    async def scenario(engine: AsyncEngine) -> None:
        slow = engine.generate(ids([1]), params(60, output_kind=OutputKind.DELTA))
        first = await anext(slow)
        assert (await collect(engine, ids([2]), params(40)))[-1].finished
        await idle(engine)
        rest = [output async for output in slow]
        assert len(rest) == 1
        assert rest[0].finished
        assert len(first.outputs[0].token_ids) + len(rest[0].outputs[0].token_ids) == 60

    drive(scenario)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_api_08_a_dead_engine_ends_every_stream(steps):
    engine = failing(steps)

    async def main() -> None:
        results = await asyncio.wait_for(
            asyncio.gather(
                *(collect(engine, ids([i]), params(50)) for i in range(6)), return_exceptions=True
            ),
            20,
        )
        assert all(isinstance(r, EngineDeadError) for r in results)
        assert "the device is gone" in str(results[0])
        with pytest.raises(EngineDeadError):
            await collect(engine, ids([1]), params())

    asyncio.run(main())
    engine.shutdown()


def test_api_08_unread_output_comes_before_the_error():
    """The engine dies while an output waits to be read: the reader gets it, and then the error, and never hangs."""
    one_was_read = threading.Event()
    engine = failing(8, one_was_read)

    async def main() -> None:
        stream = engine.generate(ids([1]), params(50))
        await anext(stream)
        one_was_read.set()
        engine.client.loop.join(10)
        unread = await anext(stream)
        assert unread.outputs[0].token_ids
        assert not unread.finished
        with pytest.raises(EngineDeadError):
            await anext(stream)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_shutdown_ends_open_streams():
    async def main() -> None:
        engine = AsyncEngine(simulated(config(), CostModel(base=0.003)))
        tasks = [asyncio.create_task(collect(engine, ids([i]), params(60))) for i in range(8)]
        await asyncio.sleep(0.02)
        await asyncio.to_thread(engine.shutdown)
        await asyncio.to_thread(engine.shutdown)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, EngineDeadError) for r in results)
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(engine, ids([1]), params())

    asyncio.run(asyncio.wait_for(main(), 20))


def test_requests_that_arrive_during_a_shutdown_do_not_hang():
    """Commands queued behind the stop are answered."""

    async def main() -> None:
        engine = AsyncEngine(simulated(config(), FAST))
        stop = threading.Thread(target=lambda: (time.sleep(0.005), engine.shutdown()))
        stop.start()
        tasks = []
        for i in range(200):
            tasks.append(asyncio.create_task(collect(engine, ids([i]), params(2))))
            await asyncio.sleep(0.0001)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        stop.join()
        assert all(isinstance(r, list | EngineDeadError) for r in results)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_commands_behind_a_second_stop_are_answered():
    """Two stops in the queue, and a request between and behind them."""
    engine = AsyncEngine(simulated(config(), FAST))

    async def main() -> None:
        engine.client.loop.stop()
        engine.client.loop.stop()
        results = await asyncio.gather(
            *(collect(engine, ids([i]), params(2)) for i in range(3)), return_exceptions=True
        )
        assert all(isinstance(r, EngineDeadError) for r in results)

    asyncio.run(asyncio.wait_for(main(), 20))
