"""The client of an ingress against replicas in this process: admission, retries, continuation, errors, aborts."""

import asyncio
import threading
import time

import numpy as np
import pytest

from jaxinfer.engine.client import EngineDeadError, EngineRequest
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.request import QueueFullError, RequestError
from jaxinfer.runner.simulated import CostModel
from tests.support import engines, fleet
from tests.support.engines import token_params
from tests.support.fleet import collect, tokens, until

pytestmark = pytest.mark.feature("replicas")

STEP = 0.005


def request(name: str, max_tokens: int = 5, prompt: tuple[int, ...] = (1, 2, 3), **values) -> EngineRequest:
    return EngineRequest(name, prompt, token_params(max_tokens=max_tokens, **{"ignore_eos": True, **values}))


def run(scenario, names: str = "ab", seconds: float = STEP, settings=None, **pool) -> None:
    settings = settings or engines.config()
    fleet.run(scenario, lambda: engines.simulated(settings, CostModel(base=seconds)), settings, names, **pool)


def by_position(request, index, position):
    """Logits that depend on the position alone, so that a longer prompt changes nothing behind it."""
    logits = np.random.default_rng(position).normal(size=engines.VOCAB).astype(np.float32)
    logits[list(engines.EOS)] = -30.0
    return logits


def run_scripted(scenario, **pool) -> None:
    """With slow steps: a script is asked for each token."""

    def script(request, index, position):
        time.sleep(STEP)
        return by_position(request, index, position)

    settings = engines.config()
    fleet.run(scenario, lambda: engines.scripted(script, settings), settings, **pool)


def test_requests_are_spread_and_answered():
    async def scenario(replicas, client):
        answers = await asyncio.gather(
            *(collect(client, request(f"r{i}", 8, (i, 2, 3))) for i in range(1, 9))
        )
        for i, deltas in enumerate(answers, start=1):
            assert len(tokens(deltas, f"r{i}")) == 8
            assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]
        assert set(replicas.routed) == {"a", "b"}
        both = await collect(client, request("x", 4, n=2), request("y", 6))
        assert [len(tokens(both, *at)) for at in (("x", 0), ("x", 1), ("y", 0))] == [4, 4, 6]
        assert (await client.refresh()).keys() == {"a", "b"}
        assert client.snapshot().requests_admitted == 10
        assert client.snapshot().generated_tokens == 8 * 8 + 14
        assert client.limits.max_model_len == 64

    run(scenario)


def test_a_conversation_stays_with_its_replica():
    async def scenario(replicas, client):
        prompt = tuple(range(1, 25))
        for turn in range(4):
            await collect(client, request(f"t{turn}", 2, prompt))
            prompt += (30 + turn,) * 4
        assert len(set(replicas.routed)) == 1
        await client.refresh()
        assert client.snapshot().prefix_hit_tokens >= 24 * 3
        assert await client.reset_prefix_cache() > 0

    run(scenario, routing={"request_tokens": 0})


def test_what_is_wrong_is_said_at_submit():
    async def scenario(replicas, client):
        with pytest.raises(RequestError, match="no tokens") as caught:
            await client.submit([request("good"), request("bad", prompt=())])
        assert caught.value.param == "prompt"
        assert len(replicas.routed) == 1, "another replica would say the same"
        with pytest.raises(RequestError, match="outside the vocabulary"):
            await client.submit([request("big", prompt=(1 << 70,))])
        first = await client.submit([request("same", 50)])
        with pytest.raises(RequestError, match="in use"):
            await client.submit([request("same")])
        await first.aclose()

    run(scenario)


def test_a_full_queue_is_refused_by_all_before_it_is_refused():
    settings = engines.config(max_num_seqs=1, max_num_batched_tokens=64, max_waiting_seqs=1)

    async def scenario(replicas, client):
        streams = [await client.submit([request(f"r{i}", 60, (i,))]) for i in (1, 2)]
        await until(lambda: all(c.engine.core.scheduler.running for c in replicas.clients.values()))
        streams += [await client.submit([request(f"r{i}", 60, (i,))]) for i in (3, 4)]
        assert sorted(replicas.routed) == ["a", "a", "b", "b"]
        before = len(replicas.routed)
        with pytest.raises(QueueFullError):
            await client.submit([request("more")])
        assert set(replicas.routed[before:]) == {"a", "b"}
        for stream in streams:
            await stream.aclose()

    run(scenario, settings=settings, seconds=0.02)


def test_requests_without_a_token_go_to_another_replica():
    """One slot per replica: of four requests on it, three wait and have delivered nothing."""
    settings = engines.config(max_num_seqs=1, max_num_batched_tokens=64)

    async def scenario(replicas, client):
        seen: dict[int, list[OutputDelta]] = {i: [] for i in range(1, 9)}

        async def read(i: int) -> None:
            async with await client.submit([request(f"r{i}", 20, (i, 7))]) as stream:
                async for deltas in stream:
                    seen[i] += deltas

        tasks = [asyncio.create_task(read(i)) for i in seen]
        await until(lambda: sum(map(bool, seen.values())) == 2)
        replicas.kill("a")
        await asyncio.gather(*tasks)
        ended = [[d.finish_reason for d in deltas if d.finish_reason] for deltas in seen.values()]
        (failed,) = [deltas for deltas, reasons in zip(seen.values(), ended) if reasons == ["error"]]
        assert ended.count(["length"]) == 7
        assert failed[-1].error == "the replica that generated this answer was lost"
        assert tokens(failed, failed[0].request_id), "it had begun"

    run(scenario, settings=settings, seconds=0.02)


def test_tokens_that_nobody_has_taken_do_not_count():
    """The model stops behind its first tokens until the replica is killed."""
    gate, settings = threading.Event(), engines.config()

    def script(request, index, position):
        if position >= 6:
            gate.wait(60)
        return by_position(request, index, position)

    async def scenario(replicas, client):
        stream = await client.submit([request("r", 12, n=2), request("s", 2)])
        await until(lambda: bool(stream._pending))
        replicas.kill(replicas.routed[0])
        gate.set()
        await until(lambda: len(replicas.routed) == 2)
        deltas = [delta async for deltas in stream for delta in deltas]
        assert [len(tokens(deltas, *at)) for at in (("r", 0), ("r", 1), ("s", 0))] == [12, 12, 2]
        assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"] * 3

    fleet.run(scenario, lambda: engines.scripted(script, settings), settings)


def test_lost_at_once_and_everywhere():
    async def scenario(replicas, client):
        replicas.kill("a")
        assert len(tokens(await collect(client, request("r")), "r")) == 5
        replicas.kill("b")
        with pytest.raises(EngineDeadError, match="every replica that was tried was lost"):
            await client.submit([request("s")])

    run(scenario)


@pytest.mark.parametrize("values", [{}, {"logprobs": 2}, {"min_tokens": 25}, {"repetition_penalty": 1.3}])
def test_greedy_continuation_is_the_uninterrupted_run(values):
    async def scenario(replicas, client):
        whole = await collect(client, request("whole", 30, **values))
        task = asyncio.create_task(collect(client, request("cut", 30, **values)))
        await until(lambda: len(replicas.routed) == 2)
        serving = replicas.routed[-1]
        before = replicas.clients[serving].engine.core.stats.generated_tokens
        await until(lambda: replicas.clients[serving].engine.core.stats.generated_tokens >= before + 8)
        replicas.kill(serving)
        cut = await task
        assert len(replicas.routed) == 3
        assert tokens(cut, "cut") == tokens(whole, "whole")
        assert len(tokens(cut, "cut")) == 30
        assert [d.finish_reason for d in cut if d.finish_reason] == ["length"]
        probs = [[p.logprob for d in deltas for p in d.logprobs] for deltas in (whole, cut)]
        assert probs[0] == pytest.approx(probs[1])

    run_scripted(scenario, on_loss="continue")


def test_what_cannot_continue_exactly_says_why():
    async def scenario(replicas, client):
        values = {"frequency_penalty": 0.5, "temperature": 0.7}
        task = asyncio.create_task(collect(client, request("r", 40, **values)))
        await until(
            lambda: (
                replicas.routed
                and replicas.clients[replicas.routed[0]].engine.core.stats.generated_tokens > 5
            )
        )
        replicas.kill(replicas.routed[0])
        deltas = await task
        assert deltas[-1].finish_reason == "error"
        assert "with frequency_penalty cannot go on elsewhere" in deltas[-1].error

    run_scripted(scenario, on_loss="continue")


def test_leaving_aborts_on_the_replica():
    async def scenario(replicas, client):
        stream = await client.submit([request("r", 60)])
        await anext(aiter(stream))
        assert replicas.num_requests() == 1
        await stream.aclose()
        await until(lambda: replicas.num_requests() == 0)

        waiting = await client.submit([request("s", 60)])
        await client.abort("s")
        assert [d.finish_reason async for deltas in waiting for d in deltas] == ["abort"]
        await until(lambda: replicas.num_requests() == 0)
        await client.abort("nobody")

    run(scenario)


def test_draining_and_the_end():
    async def scenario(replicas, client):
        stream = await client.submit([request("r", 60)])
        await client.drain(0.05)
        assert [d.finish_reason async for deltas in stream for d in deltas if d.finish_reason] == ["abort"]
        with pytest.raises(QueueFullError, match="shutting down"):
            await client.submit([request("s")])
        await client.shutdown()
        with pytest.raises(EngineDeadError):
            client.check_health()

    run(scenario)
