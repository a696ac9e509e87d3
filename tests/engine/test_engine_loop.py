"""EngineLoop and ThreadClient: commands between steps, atomic submits, slow readers, cancellation, death, counters."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest

from jaxinfer.config import ServerConfig
from jaxinfer.engine.build import Engine
from jaxinfer.engine.client import EngineDeadError, EngineDrainingError, EngineRequest
from jaxinfer.engine.deltas import OutputDelta, TokenLogprobs
from jaxinfer.engine.loop import EngineLoop
from jaxinfer.engine.snapshots import SHARED, block_owners
from jaxinfer.engine.streams import merge
from jaxinfer.engine.thread_client import ThreadClient
from jaxinfer.request import FinishReason, QueueFullError, RequestError
from jaxinfer.runner.simulated import CostModel, SimulatedRunner
from tests.support import engines
from tests.support.engines import (
    VOCAB,
    assert_clean,
    config,
    scripted,
    sequence_script,
    simulated,
    token_params,
)

pytestmark = pytest.mark.feature("EngineLoop")

FAST, SLOW = CostModel(base=0.0005), CostModel(base=0.005)

Scenario = Callable[[ThreadClient], Awaitable[None]]


def engine(
    cost: CostModel = FAST, server: dict[str, Any] | None = None, length: int = 64, **settings: Any
) -> Engine:
    values = config(**settings).model_copy(update={"server": ServerConfig(**(server or {}))})
    return simulated(values, cost, max_model_len=length)


def drive(scenario: Scenario, built: Engine) -> None:
    """Runs a scenario, waits until the engine is idle, and checks that nothing leaked."""

    async def main() -> None:
        client = ThreadClient(built)
        try:
            await asyncio.wait_for(scenario(client), 30)
            await until(lambda: client.loop.idle and not built.core.has_work)
        finally:
            await client.shutdown()
        assert client.num_requests == 0

    asyncio.run(main())
    assert_clean(built)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to that")


def request(
    name: str, max_tokens: int = 5, prompt: tuple[int, ...] = (1, 2, 3), **values: Any
) -> EngineRequest:
    return EngineRequest(name, prompt, token_params(max_tokens=max_tokens, ignore_eos=True, **values))


async def collect(client: ThreadClient, *requests: EngineRequest) -> list[OutputDelta]:
    async with await client.submit(requests) as stream:
        return [delta async for deltas in stream for delta in deltas]


def counts(client: ThreadClient) -> dict[str, int]:
    return client.snapshot().requests_finished


# ---- the loop


def test_commands_run_in_order_and_their_errors_go_to_the_caller():
    loop = EngineLoop(engine().core, lambda deltas: None, lambda error: None)
    loop.start()
    order: list[int] = []
    futures = [loop.call(lambda i=i: order.append(i)) for i in range(100)]
    assert loop.call(lambda: threading.current_thread().name).result(5) == "jaxinfer-engine"
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 // 0).result(5)
    assert [future.result(5) for future in futures] == [None] * 100
    assert order == list(range(100))
    loop.stop()
    assert loop.join(5)
    with pytest.raises(EngineDeadError, match="shut down"):
        loop.call(lambda: None).result(5)


def test_commands_behind_a_stop_are_refused_and_cancelled_ones_not_run():
    gate, reasons = threading.Event(), []
    loop = EngineLoop(engine().core, lambda deltas: None, reasons.append)
    loop.start()
    loop.call(gate.wait)
    cancelled = loop.call(lambda: pytest.fail("it was cancelled"))
    cancelled.cancel()
    loop.stop()
    late = loop.call(lambda: pytest.fail("it came after the stop"))
    gate.set()
    with pytest.raises(EngineDeadError):
        late.result(5)
    with pytest.raises(CancelledError):
        cancelled.result(5)
    assert loop.join(5)
    assert [str(reason) for reason in reasons] == ["the engine was shut down"]


def test_the_heartbeat_is_about_work_only():
    loop = EngineLoop(engine().core, lambda deltas: None, lambda error: None)
    loop.start()
    time.sleep(0.05)
    assert loop.stalled_for == 0
    gate = threading.Event()
    loop.call(gate.wait)
    time.sleep(0.1)
    assert loop.stalled_for > 0.05
    gate.set()
    loop.call(lambda: None).result(5)
    time.sleep(0.05)
    assert loop.stalled_for == 0
    loop.stop()
    assert loop.join(5)


# ---- submit


def test_a_submit_is_all_or_nothing():
    async def scenario(client: ThreadClient) -> None:
        with pytest.raises(RequestError, match="no tokens"):
            await client.submit([request("a"), request("b", prompt=())])
        with pytest.raises(RequestError, match="in use"):
            await client.submit([request("a"), request("a")])
        assert client.num_requests == 0
        with pytest.raises(RequestError, match="prompts times n is 6, but at most 5"):
            await client.submit([request(f"r{i}", n=2) for i in range(3)])
        async with await client.submit([request("long", 60)]):
            await until(lambda: client.snapshot().running == 1)
            await client.submit([request(f"w{i}", 60) for i in range(3)])
            with pytest.raises(QueueFullError, match="3 sequences are waiting and the limit is 5"):
                await client.submit([request(f"x{i}") for i in range(3)])
            assert client.snapshot().admission_rejections == 3
            for i in range(3):
                await client.abort(f"w{i}")
        deltas = await collect(client, request("a", 4, n=2), request("b", 6))
        assert sum(len(d.token_ids) for d in deltas) == 14

    drive(scenario, engine(SLOW, max_num_seqs=1, max_waiting_seqs=5))


def test_waiting_tokens_count_every_choice():
    """A prompt of 10 tokens with n = 3 takes 30 of the limit, before and after its admission. Into an empty queue
    goes whatever is asked for, as it could never be served otherwise."""

    async def scenario(client: ThreadClient) -> None:
        long = tuple(range(1, 11))
        async with await client.submit([request("a", 60)]):
            await until(lambda: client.snapshot().running == 1)
            async with await client.submit([request("b", prompt=long)]):
                with pytest.raises(QueueFullError, match="10 prompt tokens are waiting and the limit is 35"):
                    await client.submit([request("c", prompt=long, n=3)])
                async with await client.submit([request("d", prompt=long, n=2)]):
                    assert client.snapshot().waiting_tokens == 30
        await until(lambda: client.snapshot().waiting_tokens == 0)
        async with await client.submit([request("a", 60)]):
            await until(lambda: client.snapshot().running == 1)
            async with await client.submit([request("c", prompt=long, n=5)]):
                assert client.snapshot().waiting_tokens == 50

    drive(scenario, engine(SLOW, max_num_seqs=1, max_waiting_tokens=35))


def test_check_is_as_strict_as_submit_and_queues_nothing():
    async def scenario(client: ThreadClient) -> None:
        for bad in (
            request("r", prompt=(VOCAB,)),
            request("r", stop_token_ids=[VOCAB]),
            request("r", prompt=(1,) * 64),
        ):
            with pytest.raises(RequestError) as checked:
                client.check([request("ok"), bad])
            with pytest.raises(RequestError) as submitted:
                await client.submit([bad])
            assert str(checked.value) == str(submitted.value)
            assert checked.value.param == submitted.value.param
        client.check([request("ok"), request("ok2")])
        assert client.snapshot().requests_admitted == 0

    drive(scenario, engine())


# ---- ways out


@pytest.mark.parametrize("state", ["waiting", "running", "several", "prefill"])
def test_api_07_leaving_aborts_everything_in_any_state(state):
    """Within few steps nothing of the submit runs, waits or holds blocks; others go on."""

    async def scenario(client: ThreadClient) -> None:
        other = asyncio.create_task(collect(client, request("other", 50)))
        await until(lambda: client.snapshot().running == 1)
        asked = {
            "waiting": [request(f"w{i}", 900) for i in range(6)],
            "running": [request("r", 900, n=3)],
            "several": [request(f"s{i}", 900, n=2) for i in range(3)],
            "prefill": [request("p", 900, prompt=tuple(range(1, 301)))],
        }[state]
        stream = await client.submit(asked)
        if state in ("running", "several"):
            await anext(aiter(stream))
        await stream.aclose()
        await stream.aclose()
        left = client.engine.core.stats.steps_committed
        await until(lambda: client.snapshot().running + client.snapshot().waiting <= 1)
        assert client.engine.core.stats.steps_committed - left <= 10
        assert client.num_requests == 1
        assert (await other)[-1].finish_reason == "length"
        assert counts(client) == {"abort": len(asked), "length": 1}

    drive(scenario, engine(SLOW, length=1000, num_blocks=300, max_num_seqs=4, max_num_batched_tokens=32))


def test_api_07_cancelled_submits_leave_nothing():
    async def scenario(client: ThreadClient) -> None:
        for i in range(100):
            task = asyncio.create_task(client.submit([request(f"r{i}", 900), request(f"s{i}", 900)]))
            for _ in range(i % 4):
                await asyncio.sleep(0)
            if i % 5 == 0:
                await asyncio.sleep(0.001)
            task.cancel()
            for outcome in await asyncio.gather(task, return_exceptions=True):
                if not isinstance(outcome, BaseException):
                    await outcome.aclose()
        await until(lambda: client.loop.idle and not client.engine.core.has_work)
        snapshot = client.snapshot()
        assert sum(snapshot.requests_finished.values()) == snapshot.requests_admitted

    drive(scenario, engine(length=1000, num_blocks=300))


def test_api_07_normal_ends_send_no_abort():
    aborted: list[str] = []

    async def scenario(client: ThreadClient) -> None:
        abort = client.engine.core.abort
        client.engine.core.abort = lambda key: (aborted.append(key), abort(key))[1]  # type: ignore[method-assign]
        for i in range(100):
            await collect(client, request(f"r{i}", 2, n=1 + i % 3))
        assert counts(client) == {"length": 100}

    drive(scenario, engine())
    assert aborted == []


def test_abort_before_the_request_is_queued():
    """A request whose preparation takes long is aborted meanwhile: it never starts."""

    async def scenario(client: ThreadClient) -> None:
        gate = threading.Event()
        client.loop.call(gate.wait)
        task = asyncio.create_task(client.submit([request("r", prompt=(1,) * 5000)]))
        await asyncio.sleep(0.01)
        await client.abort("r")
        gate.set()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        if not isinstance(
            outcome, BaseException
        ):  # it was queued already: then it ends as any aborted request
            deltas = [delta async for news in outcome for delta in news]
            assert deltas[-1].finish_reason == "abort"
        assert client.num_requests == 0

    drive(scenario, engine(SLOW, length=8192, num_blocks=3000))


def test_drain_waits_refuses_and_aborts_the_rest():
    async def scenario(client: ThreadClient) -> None:
        tasks = [asyncio.create_task(collect(client, request(f"r{i}", n))) for i, n in enumerate((5, 900))]
        await until(lambda: client.snapshot().running == 2)
        drained = asyncio.create_task(client.drain(0.1))
        await asyncio.sleep(0)
        with pytest.raises(EngineDrainingError):
            await client.submit([request("late")])
        with pytest.raises(EngineDrainingError):
            client.check_ready()
        client.check_health()
        await drained
        assert [(await task)[-1].finish_reason for task in tasks] == ["length", "abort"]

    drive(scenario, engine(SLOW, length=1000, num_blocks=300))


# ---- slow readers


def test_ops_01_a_slow_reader_loses_its_request_and_others_do_not_notice():
    """More than 100 tokens wait: the request is aborted in the engine, its reader gets an error and no content."""

    async def scenario(client: ThreadClient) -> None:
        async with (
            await client.submit([request("slow", 900)]) as slow,
            await client.submit([request("fast", 900)]) as fast,
        ):
            longest = last = 0.0
            received = 0
            async for deltas in fast:
                received += sum(len(d.token_ids) for d in deltas)
                now = time.monotonic()
                longest, last = max(longest, now - (last or now)), now
                assert sum(len(d.token_ids) for d in slow._pending) <= 150
            assert received == 900
            assert longest < 0.5
            late = [delta async for deltas in slow for delta in deltas]
        assert [(d.finish_reason, d.token_ids) for d in late] == [(FinishReason.ERROR, ())]
        assert late[0].error == "the reader is too slow: more than 100 tokens wait to be taken"
        assert counts(client) == {"abort": 1, "length": 1}

    drive(scenario, engine(server={"max_buffered_tokens": 100}, length=1000, num_blocks=600))


def test_ops_01_choices_that_were_finished_stay_complete():
    async def scenario(client: ThreadClient) -> None:
        stream = await client.submit([request("short", 40), request("long", 900)])
        await until(lambda: client.num_requests == 0)
        deltas = [delta async for news in stream for delta in news]
        assert sum(len(d.token_ids) for d in deltas if d.request_id == "short") == 40
        ends = {d.request_id: d.finish_reason for d in deltas if d.finish_reason is not None}
        assert ends == {"short": FinishReason.LENGTH, "long": FinishReason.ERROR}

    drive(scenario, engine(server={"max_buffered_tokens": 100}, length=1000, num_blocks=600))


def test_ops_01_a_busy_event_loop_is_no_slow_reader():
    """Nobody reads while the event loop is blocked; that is not the readers' fault."""

    async def scenario(client: ThreadClient) -> None:
        tasks = [asyncio.create_task(collect(client, request(f"r{i}", 300))) for i in range(3)]
        await until(lambda: client.snapshot().running == 3)
        time.sleep(0.3)
        for task in tasks:
            deltas = await task
            assert deltas[-1].finish_reason == "length"
            assert sum(len(d.token_ids) for d in deltas) == 300
            assert len(deltas) < 300, "what piled up came merged"

    drive(scenario, engine(server={"max_buffered_tokens": 20}, length=1000, num_blocks=300))


def test_log_probabilities_count_as_buffered_too():
    entry = TokenLogprobs(1, -1.0, 1, tuple((i, -1.0) for i in range(20)))

    async def scenario(client: ThreadClient) -> None:
        stream = client._streams.open([request("a"), request("b")])
        keys = stream.keys
        for _ in range(4):
            client._streams.deliver(
                [OutputDelta(keys[0], 0, (1,), "", (entry,)), OutputDelta(keys[1], 0, (1,))]
            )
        assert client._streams.key("a") is None
        assert client._streams.key("b") is not None
        await stream.aclose()

    drive(scenario, engine(server={"max_buffered_tokens": 60}))


def test_merged_deltas_are_the_same_news():
    entry = TokenLogprobs(1, -1.0, 1)
    parts = [
        OutputDelta("a", 0, (1,), "x", (entry,), (None, entry)),
        OutputDelta("b", 0, (9,), "z"),
        OutputDelta("a", 1, (5,), "y"),
        OutputDelta("a", 0, (2, 3), "", (entry, entry)),
        OutputDelta("a", 0, (), "w", finish_reason=FinishReason.STOP, stop_reason="s", num_cached_tokens=4),
    ]
    assert merge(parts) == [
        OutputDelta("a", 0, (1, 2, 3), "xw", (entry,) * 3, (None, entry), FinishReason.STOP, "s", 4),
        OutputDelta("b", 0, (9,), "z"),
        OutputDelta("a", 1, (5,), "y"),
    ]


# ---- death


class HangingRunner(SimulatedRunner):
    def __init__(self, release: threading.Event) -> None:
        super().__init__(VOCAB, FAST)
        self._release = release
        self._left = 5

    def dispatch(self, plan, arrays):
        self._left -= 1
        if self._left == 0:
            self._release.wait(20)
        return super().dispatch(plan, arrays)


def test_api_08_a_step_that_hangs_is_found_by_the_watchdog():
    release = threading.Event()
    values = config().model_copy(update={"server": ServerConfig(watchdog=0.2)})
    built = engines.build(lambda _: HangingRunner(release), values)

    async def scenario(client: ThreadClient) -> None:
        tasks = [asyncio.create_task(collect(client, request(f"r{i}", 60))) for i in range(3)]
        await asyncio.sleep(0.05)
        client.check_health()
        await until(lambda: client.loop.stalled_for > 0.2)
        with pytest.raises(EngineDeadError, match=r"no step for 0\.2 s"):
            client.check_health()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, EngineDeadError) for outcome in outcomes)
        release.set()
        for name in ("r0", "r1", "r2"):  # nobody is left who could: the engine goes on with what nobody wants
            client.loop.call(
                lambda name=name: [client.engine.core.abort(key) for key in client.engine.core.request_ids]
            )

    drive(scenario, built)


# ---- counters


def test_ops_04_every_admitted_request_is_finished_once():
    """OPS-04: 5 normal ones, 5 aborted while decoding, 2 aborted while waiting, 1 refused with an error (not counted
    as admitted), 1 that fails alone. Prompt tokens are counted at admission, aborted requests included."""
    script = sequence_script([7] * 400)

    def failing(asked, index, position):
        row = script(asked, index, position)
        return row * float("nan") if asked.prompt_token_ids[0] == 99 else row

    built = scripted(failing, config(max_num_seqs=6, num_blocks=600), max_model_len=500)

    async def scenario(client: ThreadClient) -> None:
        before = client.snapshot()
        await asyncio.gather(*(collect(client, request(f"n{i}", 5)) for i in range(5)))
        streams = [await client.submit([request(f"d{i}", 400)]) for i in range(6)]
        for stream in streams:
            await anext(aiter(stream))
        waiting = [await client.submit([request(f"w{i}", 400)]) for i in range(2)]
        assert client.snapshot().waiting == 2
        for stream in (*waiting, *streams[:5]):
            await stream.aclose()
        with pytest.raises(RequestError):
            await client.submit([request("bad", prompt=())])
        failed = await collect(client, request("f", prompt=(99, 1)))
        assert failed[-1].finish_reason == "error"
        await streams[5].aclose()
        await until(lambda: client.snapshot().running == 0)
        after = client.snapshot()
        assert after.requests_finished == {"length": 5, "abort": 8, "error": 1}
        assert after.requests_admitted == 14
        assert after.prompt_tokens == 13 * 3 + 2
        assert (after.running, after.waiting, after.waiting_tokens, after.used_blocks) == (0, 0, 0, 0)
        for name in (
            "prompt_tokens",
            "generated_tokens",
            "steps_total",
            "requests_admitted",
            "prefix_query_tokens",
        ):
            assert getattr(after, name) > getattr(before, name)

    drive(scenario, built)


def test_ops_04_recomputation_is_no_prefix_hit():
    async def scenario(client: ThreadClient) -> None:
        await asyncio.gather(
            *(
                collect(client, request(f"r{i}", 40, prompt=(10 * i + 1, 10 * i + 2, 10 * i + 3)))
                for i in range(4)
            )
        )
        snapshot = client.snapshot()
        assert snapshot.preemptions > 0
        assert snapshot.prefix_hit_tokens == 0
        assert snapshot.prefix_query_tokens == snapshot.prompt_tokens == 12
        assert snapshot.generated_tokens == 160
        assert sum(step.preempted for step in snapshot.steps) == snapshot.preemptions
        assert sum(snapshot.steps_by_tokens) == snapshot.steps_total

    drive(scenario, engine(num_blocks=24))


def test_step_records_are_the_newest_ones_and_tell_prefill_from_decode():
    async def scenario(client: ThreadClient) -> None:
        await collect(client, request("r", 300, prompt=tuple(range(1, 41))))
        steps = client.snapshot().steps
        assert len(steps) == 256
        assert [step.index for step in steps] == list(range(steps[0].index, steps[0].index + 256))
        assert steps[-1].index == client.snapshot().steps_total - 1
        assert {step.decode_tokens for step in steps} == {1}
        await client.reset_prefix_cache()
        await collect(client, request("r", 1, prompt=tuple(range(1, 41))))
        last = client.snapshot().steps[-1]
        assert (last.prefill_tokens, last.decode_tokens, last.sequences) == (40, 0, 1)
        assert last.device_seconds >= 0.0004
        assert 0 < last.host_seconds < 1

    drive(scenario, engine(length=1000, num_blocks=300))


def test_block_owners_and_the_reset_of_the_prefix_cache():
    async def scenario(client: ThreadClient) -> None:
        prompt = tuple(range(1, 18))
        async with await client.submit([request("r", 300, prompt=prompt, n=2)]) as stream:
            await until(lambda: client.snapshot().running == 2)
            await anext(aiter(stream))
            owners = await client.block_owners()
            assert owners.count(SHARED) == len(prompt) // 4
        await until(lambda: client.snapshot().used_blocks == 0)
        cached = client.snapshot().cached_blocks
        assert cached >= len(prompt) // 4
        assert (await client.block_owners()).count(1) == cached
        assert await client.reset_prefix_cache() == cached
        assert client.snapshot().cached_blocks == 0
        assert set(block_owners(client.engine.core.scheduler.kv)) == {0}

    drive(scenario, engine(SLOW, length=1000, num_blocks=300))
