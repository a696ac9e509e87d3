"""Decode and prefill engines that exchange blocks, in this process or in one of their own.

``python -m tests.support.two_engines ROLE TRANSPORT ADDRESS NAME=VALUE...`` is such an engine on shadow memory. It says
on stdout where it listens, then obeys lines on stdin: ``complete ID,ID,...`` answers with the next tokens, ``ask ...``
does the same and says nothing, ``sent`` with the bytes and blocks that it sent, ``clean`` when nothing runs and nothing
leaked.
"""

import asyncio
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
import pytest

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.config import EngineConfig
from jaxinfer.config_disaggregation import DisaggregationConfig
from jaxinfer.engine.build import Engine
from jaxinfer.engine.client import EngineRequest
from jaxinfer.engine.thread_client import ThreadClient
from jaxinfer.kv_transfer.connector import KVConnector
from jaxinfer.kv_transfer.layout import BlockLayout
from jaxinfer.kv_transfer.zmq_connector import ZmqConnector
from tests.support import engines
from tests.support.engines import assert_clean, token_params
from tests.support.shadow_runner import DIGEST, ShadowModel, ShadowRunner, histories

TOKENS = 6
COMMON: dict[str, Any] = {"timeout": 120.0, "heartbeat": 20.0, "connect_timeout": 60.0}
"""A busy machine may stand still for a while."""
HAS_NIXL = any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13"))
NIXL = pytest.param("nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="nixl is not installed"))
TRANSPORTS = ["host", "jax", NIXL]


MakeEngine = Callable[[EngineConfig, Callable[[BlockLayout], KVConnector]], Engine]
"""Makes an engine of the configuration, with what connects it; it is not started."""


def connected(
    make: MakeEngine, settings: EngineConfig, role: DisaggregationConfig
) -> tuple[Engine, ZmqConnector]:
    """An engine that is connected with its peers, and what connects it."""
    made: list[ZmqConnector] = []

    def connector(layout: BlockLayout) -> ZmqConnector:
        made.append(ZmqConnector(role, layout, "tiny", "same"))
        return made[0]

    engine = make(settings.model_copy(update={"disaggregation": role}), connector)
    assert engine.core.remote is not None
    engine.core.remote.connect()
    return engine, made[0]


def shadow(settings: EngineConfig, connector: Callable[[BlockLayout], KVConnector]) -> Engine:
    """An engine without a model, that checks every read."""
    runners: list[ShadowRunner] = []
    blocks = settings.cache.num_blocks
    assert blocks is not None

    def make(plan: CompilePlan) -> ShadowRunner:
        runners.append(ShadowRunner(ShadowModel(), plan, (None,), blocks))
        return runners[0]

    layout = BlockLayout((1,), ((DIGEST, DIGEST),), (0,), (None,), settings.cache.block_size, "uint8")
    engine = engines.build(make, settings, vocab=8, eos=(5,), connector=connector(layout), start=False)
    runners[0].kv = engine.core.scheduler.kv
    return engine


def shadow_settings() -> EngineConfig:
    return engines.config(num_blocks=64, max_num_batched_tokens=32, chunk_size=8)


def shadow_prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 6, length).tolist()


def shadow_tokens(prompt: list[int]) -> list[int]:
    """What any engine on shadow memory says behind a prompt."""
    return ShadowModel().greedy_tokens(histories(None, prompt)[-1], TOKENS)


def prefill_role(**values: Any) -> DisaggregationConfig:
    return DisaggregationConfig(role="prefill", **{"bind": "tcp://127.0.0.1:0", **COMMON, **values})


def decode_role(address: str, **values: Any) -> DisaggregationConfig:
    return DisaggregationConfig(role="decode", peers=(address,), min_tokens=8, **{**COMMON, **values})


def address_of(connector: ZmqConnector) -> str:
    assert connector.server is not None
    return connector.server.address


@asynccontextmanager
async def two_engines(
    here: MakeEngine, there: MakeEngine, settings: EngineConfig, **roles: Any
) -> AsyncIterator[tuple[ThreadClient, ThreadClient]]:
    """A decode and a prefill engine of this process, with their loops on threads.

    Args:
        roles: values of both configurations.
    """
    prefill, server = connected(there, settings, prefill_role(**roles))
    decode, _ = connected(here, settings, decode_role(address_of(server), **roles))
    clients = ThreadClient(decode), ThreadClient(prefill)
    try:
        yield clients
    finally:
        for client in clients:
            await client.shutdown()


async def complete(client: ThreadClient, name: str, prompt: list[int], count: int = TOKENS) -> list[int]:
    """The next tokens of a prompt, greedily."""
    request = EngineRequest(name, tuple(prompt), token_params(max_tokens=count, ignore_eos=True))
    tokens: list[int] = []
    async with await client.submit([request]) as stream:
        async for deltas in stream:
            for delta in deltas:
                assert delta.error is None
                tokens += delta.token_ids
    return tokens


async def until_clean(*clients: ThreadClient) -> None:
    """Waits until nothing runs, and asserts that nothing leaked."""
    for client in clients:
        core = client.engine.core
        while core.num_requests or core.has_work or not client.loop.idle:
            await asyncio.sleep(0.01)
        assert_clean(client.engine)


# ---- an engine in a process of its own


@dataclass
class EngineChild:
    process: "subprocess.Popen[str]"
    address: str

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def call(self, line: str) -> str:
        self.say(line)
        return self.answer()


@contextmanager
def engine_process(role: str, transport: str, address: str = "", **values: float) -> Iterator[EngineChild]:
    """Starts an engine, and leaves no process behind.

    Args:
        values: of the role's configuration.
    """
    given = [f"{name}={value}" for name, value in values.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.two_engines", role, transport, address, *given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
    )
    child = EngineChild(process, "")
    try:
        child.address = child.answer()
        assert child.address, "the engine did not start"
        yield child
    finally:
        process.kill()
        process.wait(60)


async def _serve(client: ThreadClient, answers: TextIO) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    event_loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin:
            event_loop.call_soon_threadsafe(lines.put_nowait, line.strip())

    threading.Thread(target=read, daemon=True).start()
    tasks: list[asyncio.Task[Any]] = []
    for number in range(1 << 30):
        command, _, argument = (await lines.get()).partition(" ")
        if command in ("complete", "ask"):
            prompt = [int(token) for token in argument.split(",")]
            task = asyncio.create_task(complete(client, str(number), prompt))
            if command == "complete":
                print(",".join(map(str, await task)), file=answers, flush=True)
            tasks.append(task)
        elif command == "sent":
            stats = client.snapshot().transfers
            print(stats.sent_bytes, stats.sent_blocks, file=answers, flush=True)
        elif command == "clean":
            await until_clean(client)
            print("clean", file=answers, flush=True)


def main() -> None:
    role, transport, address, *given = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # a transport may log to what it finds there
    values = {name: float(value) for name, value in (text.split("=") for text in given)}
    roles: dict[str, Any] = {"transport": transport, **values}
    if role == "prefill":
        engine, connector = connected(shadow, shadow_settings(), prefill_role(**roles))
        address = address_of(connector)
    else:
        engine, _ = connected(shadow, shadow_settings(), decode_role(address, **roles))
    print(address, file=answers, flush=True)
    asyncio.run(_serve(ThreadClient(engine), answers))


if __name__ == "__main__":
    main()
