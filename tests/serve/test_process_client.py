"""ProcessClient against real engine processes around a simulated model."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.config import EngineConfig, ModelConfig, ServerConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.engine.client import EngineDeadError, EngineDrainingError, EngineRequest
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.request import QueueFullError, RequestError
from serve.process.client import EngineStartError, ProcessClient
from tests.support import engines
from tests.support.engines import token_params

pytestmark = pytest.mark.feature("engine process")

Scenario = Callable[[ProcessClient], Awaitable[None]]


def settings(reference: str = "test", server: dict[str, Any] | None = None, **scheduler: Any) -> EngineConfig:
    base = engines.config(**scheduler)
    return base.model_copy(
        update={"model": ModelConfig(reference=reference), "server": ServerConfig(**(server or {}))}
    )


def command(seconds: float = 0.002, steps: int = -1) -> list[str]:
    return [sys.executable, "-m", "tests.support.engine_process", str(seconds), str(steps)]


def drive(scenario: Scenario, config: EngineConfig | None = None, **options: Any) -> None:
    """Runs a scenario against an engine process and checks that nothing is left of it."""

    async def main() -> None:
        client = await ProcessClient.start(config or settings(), command=command(**options))
        directory = client._process._directory
        assert directory.stat().st_mode & 0o077 == 0, "others could read the sockets"
        try:
            await asyncio.wait_for(scenario(client), 30)
        finally:
            await client.shutdown()
        assert not directory.exists()
        assert not Path(f"/proc/{client.pid}").exists()
        assert client.num_requests == 0

    asyncio.run(main())


def request(
    name: str, max_tokens: int = 5, prompt: tuple[int, ...] = (1, 2, 3), **values: Any
) -> EngineRequest:
    return EngineRequest(name, prompt, token_params(max_tokens=max_tokens, ignore_eos=True, **values))


async def collect(client: ProcessClient, *requests: EngineRequest) -> list[OutputDelta]:
    async with await client.submit(requests) as stream:
        return [delta async for deltas in stream for delta in deltas]


def tokens(deltas: list[OutputDelta], name: str, index: int = 0) -> list[int]:
    return [t for d in deltas if (d.request_id, d.index) == (name, index) for t in d.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


async def idle(client: ProcessClient) -> None:
    await until(lambda: client.snapshot().running + client.snapshot().waiting == 0)


def test_requests_news_and_operations(tmp_path):
    """One process for much of the contract, as a process takes seconds to start."""

    async def scenario(client: ProcessClient) -> None:
        assert client.limits.max_model_len == 64
        assert client.sampling_defaults == {"temperature": 0.5}
        assert client.tokenizer is None

        several = await asyncio.gather(*(collect(client, request(f"r{i}", 20, seed=i)) for i in range(8)))
        for i, deltas in enumerate(several):
            assert len(tokens(deltas, f"r{i}")) == 20
            assert [d.finish_reason for d in deltas][-1] == "length"
            assert sum(d.finish_reason is not None for d in deltas) == 1
        both = await collect(client, request("a", 4, n=2), request("b", 6))
        assert [len(tokens(both, "a", 0)), len(tokens(both, "a", 1)), len(tokens(both, "b"))] == [4, 4, 6]
        await idle(client)
        snapshot = client.snapshot()
        assert snapshot.requests_admitted == 10
        assert snapshot.requests_finished == {"length": 10}
        assert snapshot.generated_tokens == 8 * 20 + 14
        assert snapshot.used_blocks == 0
        assert 0 < snapshot.cached_blocks <= snapshot.num_blocks
        assert [step.index for step in snapshot.steps] == list(range(snapshot.steps_total))[-256:]
        assert all(step.device_seconds >= 0 for step in snapshot.steps)

        bad = request("bad", prompt=())
        with pytest.raises(RequestError, match="no tokens") as caught:
            client.check([bad])
        with pytest.raises(RequestError, match="no tokens") as sent:
            await client.submit([request("good"), bad])
        assert (str(sent.value), sent.value.param) == (str(caught.value), caught.value.param)
        assert client.num_requests == 0

        owners = await client.block_owners()
        assert len(owners) == client.limits.num_blocks
        assert sum(owner == 1 for owner in owners) == snapshot.cached_blocks
        assert await client.reset_prefix_cache() == snapshot.cached_blocks
        assert set(await client.block_owners()) == {0}

        await client.start_profile(str(tmp_path))
        with pytest.raises(RequestError, match="already"):
            await client.start_profile(str(tmp_path))
        await client.stop_profile()
        with pytest.raises(RequestError, match="no profile"):
            await client.stop_profile()
        assert list(tmp_path.rglob("*"))

    drive(scenario)


def test_api_03_token_ids_that_fit_no_message_are_refused():
    async def scenario(client: ProcessClient) -> None:
        for token in (2**64, -(2**63) - 1, 2**200, 2**63, -1):
            with pytest.raises(RequestError, match="outside the vocabulary"):
                await client.submit([request("a", prompt=(1, token))])
        for bad, message in (
            (request("a", stop=["\ud800"], detokenize=True), "no Unicode text"),
            (EngineRequest("a", (1,), token_params(), priority=1.5), "cannot be read"),  # type: ignore[arg-type]
        ):
            with pytest.raises(RequestError, match=message):
                await client.submit([bad])
        await asyncio.sleep(0)
        assert not client._replies
        assert len(await collect(client, request("a"))) > 0

    drive(scenario)


def test_api_07_leaving_aborts_and_a_normal_end_does_not():
    async def scenario(client: ProcessClient) -> None:
        for i in range(20):
            await collect(client, request(f"n{i}", 3))
        assert "abort" not in client.snapshot().requests_finished
        async with await client.submit([request(f"x{i}", 60, n=2) for i in range(3)]) as stream:
            await anext(stream)
        await until(lambda: client.snapshot().requests_finished == {"length": 20, "abort": 3})
        assert client.snapshot().used_blocks == 0
        task = asyncio.create_task(client.submit([request("y", 60)]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.1)
        await idle(client)
        assert client.num_requests == 0
        last: list[OutputDelta] = []
        async with await client.submit([request("z", 60)]) as stream:
            await anext(stream)
            await client.abort("z")
            await client.abort("unknown")
            last = [delta async for deltas in stream for delta in deltas]
        assert last[-1].finish_reason == "abort"

    drive(scenario, seconds=0.005)


def test_ops_04_a_full_queue_is_counted():
    async def scenario(client: ProcessClient) -> None:
        outcomes = await asyncio.gather(
            *(collect(client, request(f"r{i}", 20)) for i in range(12)), return_exceptions=True
        )
        refused = [o for o in outcomes if isinstance(o, QueueFullError)]
        assert len(refused) + sum(isinstance(o, list) for o in outcomes) == 12
        assert refused
        with pytest.raises(RequestError, match="at most 2"):
            await client.submit([request("many", n=3)])
        await idle(client)
        snapshot = client.snapshot()
        assert snapshot.admission_rejections == len(refused)
        assert snapshot.requests_admitted == sum(snapshot.requests_finished.values()) == 12 - len(refused)

    drive(scenario, settings(max_waiting_seqs=2, max_num_seqs=2))


def test_drain_refuses_new_requests_and_lets_the_others_end():
    async def scenario(client: ProcessClient) -> None:
        tasks = [asyncio.create_task(collect(client, request(f"r{i}", n))) for i, n in enumerate((10, 60))]
        await asyncio.sleep(0.05)
        client.check_ready()
        drained = asyncio.create_task(client.drain(0.2))
        await asyncio.sleep(0)
        with pytest.raises(EngineDrainingError):
            await client.submit([request("late")])
        with pytest.raises(EngineDrainingError):
            client.check_ready()
        await drained
        short, long = await asyncio.gather(*tasks)
        assert (short[-1].finish_reason, long[-1].finish_reason) == ("length", "abort")
        client.check_health()

    drive(scenario, seconds=0.01)


def test_api_08_a_failed_step_ends_streams_with_the_reason():
    async def scenario(client: ProcessClient) -> None:
        begun = time.monotonic()
        outcomes = await asyncio.gather(
            *(collect(client, request(f"r{i}", 60)) for i in range(4)), return_exceptions=True
        )
        assert time.monotonic() - begun < 2
        assert all(isinstance(o, EngineDeadError) and "the device is gone" in str(o) for o in outcomes)
        with pytest.raises(EngineDeadError, match="the device is gone"):
            client.check_health()
        with pytest.raises(EngineDeadError):
            await client.submit([request("late")])

    drive(scenario, steps=10)


def test_api_08_a_killed_process_ends_streams_at_once():
    async def scenario(client: ProcessClient) -> None:
        async with await client.submit([request("r", 60)]) as stream:
            await anext(stream)
            os.kill(client.pid, signal.SIGKILL)
            killed = time.monotonic()
            with pytest.raises(EngineDeadError, match="status -9"):
                async for _ in stream:
                    pass
            assert time.monotonic() - killed < 1
        with pytest.raises(EngineDeadError):
            client.check_health()
        with pytest.raises(EngineDeadError):
            await client.reset_prefix_cache()

    drive(scenario, seconds=0.02)


def test_a_step_that_hangs_is_found_by_the_watchdog():
    async def scenario(client: ProcessClient) -> None:
        async with await client.submit([request("r", 60)]) as stream:
            await anext(stream)
            client.check_health()
            await until(lambda: client._stalled_for > 1)
            with pytest.raises(EngineDeadError, match="no step"):
                client.check_health()
            with pytest.raises(EngineDeadError, match="no step"):
                async for _ in stream:
                    pass

    drive(scenario, settings("hang", {"watchdog": 1.0}), steps=5)


def test_a_process_that_is_stopped_is_found_by_the_watchdog():
    """Also without work: nobody answers."""

    async def scenario(client: ProcessClient) -> None:
        await asyncio.sleep(1.5)
        client.check_health()
        os.kill(client.pid, signal.SIGSTOP)
        await asyncio.sleep(1.6)
        with pytest.raises(EngineDeadError, match="does not answer"):
            client.check_health()

    drive(scenario, settings(server={"watchdog": 1.0}))


@pytest.mark.parametrize(
    ("reference", "kind", "message"),
    [
        ("broken", ConfigError, "model.reference: this model is broken"),
        ("bug", EngineStartError, "AssertionError: a bug"),
    ],
)
def test_errors_of_the_start_reach_the_parent(reference, kind, message):
    async def main() -> None:
        with pytest.raises(kind) as caught:
            await ProcessClient.start(settings(reference), command=command())
        assert str(caught.value) == message

    asyncio.run(main())


def test_a_process_that_ends_before_it_is_ready():
    async def main() -> None:
        with pytest.raises(EngineStartError, match="status 3"):
            await ProcessClient.start(settings(), command=[sys.executable, "-c", "import sys; sys.exit(3)"])

    asyncio.run(main())
