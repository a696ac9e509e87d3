"""Replicas of one model in this process, behind the real client of an ingress: what Ray does, without Ray."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from jaxinfer.config import EngineConfig
from jaxinfer.engine.build import Engine
from jaxinfer.engine.client import EngineRequest
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.engine.thread_client import ThreadClient
from serve.process.wire import Ready
from serve.replicas.client import ReplicasClient
from serve.replicas.config import ModelPool
from serve.replicas.policy import Candidate, RouteKey, make_policy
from serve.replicas.replica import Replica
from serve.replicas.transport import ReplicaLostError

BuildEngine = Callable[[], Engine]
Scenario = Callable[["Fleet", ReplicasClient], Awaitable[None]]


class Fleet:
    """A ``Transport``. Replicas can be killed, and are not replaced.

    Attributes:
        routed: names of the replicas in the order in which they got requests.
    """

    def __init__(self, pool: ModelPool, build: BuildEngine, names: str) -> None:
        self.clients = {name: ThreadClient(build()) for name in names}
        self.replicas = {
            name: Replica(name, client, Ready.of(client.engine)) for name, client in self.clients.items()
        }
        self.routed: list[str] = []
        self._policy = make_policy(pool.routing)
        self._in_flight: Counter[str] = Counter()
        self._killed = {name: asyncio.Event() for name in names}

    async def describe(self) -> bytes:
        return next(iter(self.replicas.values())).describe()

    async def generate(self, submission: bytes, key: RouteKey) -> AsyncGenerator[bytes, None]:
        candidates = [Candidate(name, self._in_flight[name]) for name in self.clients]
        ranked = self._policy.rank(candidates, key)
        if not ranked:
            raise ReplicaLostError("there is no replica")
        name = ranked[0]
        self.routed.append(name)
        self._in_flight[name] += 1
        self._policy.placed(name, key)
        killed = asyncio.ensure_future(self._killed[name].wait())
        messages = self.replicas[name].generate(submission)
        try:
            while True:
                following = asyncio.ensure_future(anext(messages, None))
                await asyncio.wait({following, killed}, return_when=asyncio.FIRST_COMPLETED)
                if killed.done():
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
                    raise ReplicaLostError("the replica died", name)
                data = following.result()
                if data is None:
                    return
                yield data
        finally:
            self._in_flight[name] -= 1
            killed.cancel()
            await messages.aclose()

    def kill(self, name: str) -> None:
        self._killed[name].set()
        del self.replicas[name]
        self.clients[name]._loop.stop()
        del self.clients[name]

    async def reports(self) -> list[bytes]:
        return [replica.report() for replica in self.replicas.values()]

    async def reset_prefix_cache(self) -> int:
        return sum([await replica.reset_prefix_cache() for replica in self.replicas.values()])

    async def stop(self) -> None:
        for client in self.clients.values():
            await client.shutdown()

    def num_requests(self) -> int:
        return sum(client.engine.core.num_requests for client in self.clients.values())


def run(
    scenario: Scenario,
    build: BuildEngine,
    config: EngineConfig,
    names: str = "ab",
    **pool: Any,
) -> None:
    """Runs a scenario against a fleet, and checks that no request is left in it."""

    async def main() -> None:
        settings = ModelPool(config="test", **pool)
        fleet = Fleet(settings, build, names)
        client = await ReplicasClient.start(config, settings, fleet)
        try:
            await asyncio.wait_for(scenario(fleet, client), 60)
            await until(lambda: fleet.num_requests() == client.num_requests == len(client._flights) == 0)
        finally:
            await client.shutdown()
            await fleet.stop()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


async def collect(client: ReplicasClient, *requests: EngineRequest) -> list[OutputDelta]:
    async with await client.submit(requests) as stream:
        return [delta async for deltas in stream for delta in deltas]


def tokens(deltas: list[OutputDelta], name: str, index: int = 0) -> list[int]:
    return [t for d in deltas if (d.request_id, d.index) == (name, index) for t in d.token_ids]
