"""Two engines in two processes, over every transport that is installed; and what one does when the other is killed."""

import asyncio
import time

import pytest

from jaxinfer.engine.thread_client import ThreadClient
from tests.support.two_engines import (
    TRANSPORTS,
    address_of,
    complete,
    connected,
    decode_role,
    engine_process,
    prefill_role,
    shadow,
    shadow_prompt,
    shadow_settings,
    shadow_tokens,
    until_clean,
)

KILLED = {"heartbeat": 1.0, "timeout": 60.0}
BYTES_PER_BLOCK = 2 * 4 * 8
"""K and V, slots, bytes of a token on shadow memory."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.feature("disaggregation")]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_outputs_are_those_of_one_engine_and_only_missing_blocks_travel(transport) -> None:
    first, short = shadow_prompt(45, 1), shadow_prompt(6, 2)
    longer = [*first[:24], *shadow_prompt(30, 3)]
    prompts = [first, short, longer, first]
    blocks = [11, 0, 14 - 6, 0]

    async def main() -> list[list[int]]:
        with engine_process("prefill", transport) as child:
            role = decode_role(child.address, transport=transport)
            engine, _ = connected(shadow, shadow_settings(), role)
            client = ThreadClient(engine)
            try:
                tokens, sent = [], 0
                for i, prompt in enumerate(prompts):
                    tokens.append(await complete(client, str(i), prompt))
                    sent += blocks[i]
                    assert child.call("sent") == f"{sent * BYTES_PER_BLOCK} {sent}"
                assert client.snapshot().transfers.fetches_failed == 0
                await until_clean(client)
                assert child.call("clean") == "clean"
                return tokens
            finally:
                await client.shutdown()

    assert asyncio.run(main()) == list(map(shadow_tokens, prompts))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_prefill_engine_that_is_killed_is_made_up_for(transport) -> None:
    prompts = [shadow_prompt(58, i) for i in range(40)]

    async def main() -> list[list[int]]:
        with engine_process("prefill", transport) as child:
            role = decode_role(child.address, transport=transport, **KILLED)
            engine, _ = connected(shadow, shadow_settings(), role)
            client = ThreadClient(engine)
            try:
                tasks = [asyncio.create_task(complete(client, str(i), p)) for i, p in enumerate(prompts)]
                while client.snapshot().transfers.received_blocks < 20:
                    await asyncio.sleep(0.001)
                child.process.kill()
                tokens = list(await asyncio.gather(*tasks))
                await until_clean(client)
                assert client.snapshot().transfers.fetches_failed > 0
                return tokens
            finally:
                await client.shutdown()

    assert asyncio.run(main()) == list(map(shadow_tokens, prompts))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_decode_engine_that_is_killed_leaves_nothing_behind(transport) -> None:
    async def main() -> None:
        role = prefill_role(transport=transport, **KILLED)
        engine, connector = connected(shadow, shadow_settings(), role)
        client = ThreadClient(engine)
        try:
            with engine_process("decode", transport, address_of(connector), **KILLED) as child:
                for i in range(40):
                    child.say("ask " + ",".join(map(str, shadow_prompt(58, i))))
                while client.snapshot().transfers.sent_blocks < 20:
                    await asyncio.sleep(0.001)
                child.process.kill()
                end = time.monotonic() + 120
                while connector.server is not None and connector.server.num_jobs:
                    assert time.monotonic() < end, "jobs of an engine that is gone are left"
                    await asyncio.sleep(0.05)
            await until_clean(client)
            with engine_process(
                "decode", transport, address_of(connector)
            ) as child:  # it serves the next one
                prompt = shadow_prompt(50, 99)
                answer = child.call("complete " + ",".join(map(str, prompt)))
                assert [int(token) for token in answer.split(",")] == shadow_tokens(prompt)
        finally:
            await client.shutdown()

    asyncio.run(main())
