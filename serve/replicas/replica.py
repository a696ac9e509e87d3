"""The inside of a replica, whatever carries its messages."""

from collections.abc import AsyncGenerator
from dataclasses import replace

import msgspec

from jaxinfer.config import EngineConfig
from jaxinfer.engine.client import EngineClient, EngineDeadError, EngineDrainingError, OutputStream
from jaxinfer.request import QueueFullError, RequestError
from serve.process.client import ProcessClient
from serve.process.wire import Failure, Ready
from serve.replicas import wire
from serve.replicas.demand import KV_USAGE, REQUESTS
from serve.run import EngineSource, start_client


class Replica:
    """Serves ingresses with an engine.

    Args:
        name: of the replica, unique in its deployment.
        client: the engine.
        ready: what its front ends start from.
    """

    def __init__(self, name: str, client: EngineClient, ready: Ready) -> None:
        self._name = name
        self._client = client
        self._ready = ready

    def describe(self) -> bytes:
        return wire.encode(self._ready)

    async def generate(self, submission: bytes) -> AsyncGenerator[bytes, None]:
        """Messages of one stream: ``Admitted`` and then ``News``, or ``Refused``. Closing it aborts what runs.

        Args:
            submission: requests, encoded; their ids are unique among all ingresses.
        """
        try:
            requests = wire.decode_requests(msgspec.Raw(submission))
            stream = await self._client.submit(requests)
        except (RequestError, QueueFullError, EngineDrainingError) as error:
            yield wire.encode(wire.Refused(self._name, Failure.of(error)))
            return
        except EngineDeadError as error:
            yield wire.encode(wire.Lost(str(error)))
            return
        async for data in self._news(stream):
            yield data

    async def _news(self, stream: OutputStream) -> AsyncGenerator[bytes, None]:
        async with stream:
            yield wire.encode(wire.Admitted(self._name))
            try:
                async for deltas in stream:
                    yield wire.encode(wire.News(deltas))
            except EngineDeadError as error:
                yield wire.encode(wire.Lost(str(error)))

    def report(self) -> bytes:
        """A ``wire.Report``."""
        snapshot = replace(self._client.snapshot(), steps=())
        return wire.encode(wire.Report(self._name, snapshot, self.healthy))

    @property
    def healthy(self) -> bool:
        try:
            self._client.check_health()
        except EngineDeadError:
            return False
        return True

    def load(self) -> dict[str, float]:
        """For routing and scaling."""
        now = self._client.snapshot()
        return {
            REQUESTS: float(now.running + now.waiting),
            KV_USAGE: now.used_blocks / max(now.num_blocks, 1),
        }

    def check_health(self) -> None:
        """Raises:
        EngineDeadError: the replica is to be replaced.
        """
        self._client.check_health()

    async def reset_prefix_cache(self) -> int:
        return await self._client.reset_prefix_cache()

    async def shutdown(self) -> None:
        await self._client.shutdown()


async def start_replica(name: str, config: EngineConfig, source: EngineSource) -> Replica:
    """Builds the engine; see ``start_client`` for errors."""
    client = await start_client(config, source, lambda what, done, total: None)
    ready = client.ready if isinstance(client, ProcessClient) else Ready.of(client.engine)
    return Replica(name, client, ready)
