"""A prefill engine that is to stop: it ends what it began, and decode engines compute the rest themselves."""

import asyncio
import threading

import pytest

from jaxinfer.engine.thread_client import ThreadClient
from jaxinfer.kv_transfer.zmq_connector import ZmqConnector
from tests.support.two_engines import (
    complete,
    shadow,
    shadow_prompt,
    shadow_settings,
    shadow_tokens,
    two_engines,
    until_clean,
)

pytestmark = pytest.mark.feature("disaggregation")


def connector(client: ThreadClient) -> ZmqConnector:
    assert client.engine.core.remote is not None
    found = client.engine.core.remote._connector
    assert isinstance(found, ZmqConnector)
    return found


async def until(condition) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


def test_a_drained_prefill_engine_ends_the_prompts_that_it_took() -> None:
    async def main() -> None:
        async with two_engines(shadow, shadow, shadow_settings()) as (decode, prefill):
            server = connector(prefill).server
            assert server is not None
            taken, refused = shadow_prompt(40, 1), shadow_prompt(41, 2)
            go_on = threading.Event()
            prefill.loop.call(lambda: go_on.wait(60))
            asked = asyncio.create_task(complete(decode, "taken", taken))
            await until(lambda: server.num_jobs == 1)
            draining = asyncio.create_task(prefill.drain(60))
            await until(lambda: not connector(decode).available)
            assert await complete(decode, "refused", refused) == shadow_tokens(refused)
            assert not draining.done()
            assert not asked.done()
            go_on.set()
            assert await asked == shadow_tokens(taken)
            await draining
            stats = decode.snapshot().transfers
            assert (stats.fetches, stats.fetches_failed, stats.received_blocks) == (1, 0, 10)
            assert prefill.snapshot().transfers.jobs_failed == 0
            await until_clean(decode, prefill)

    asyncio.run(main())


def test_a_drain_of_an_engine_that_is_alone_or_decodes_ends_at_once() -> None:
    async def main() -> None:
        async with two_engines(shadow, shadow, shadow_settings()) as (decode, prefill):
            await asyncio.wait_for(prefill.drain(60), 20)
            await asyncio.wait_for(decode.drain(60), 20)

    asyncio.run(main())
