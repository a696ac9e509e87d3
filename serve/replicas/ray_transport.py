"""The replicas of one deployment of Ray Serve."""

import logging
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from jaxinfer.engine.client import EngineDeadError
from serve.replicas.policy import RouteKey
from serve.replicas.transport import ReplicaLostError

logger = logging.getLogger(__name__)

BROADCAST_TIMEOUT = 5.0


class RayTransport:
    """A ``Transport`` over a handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def describe(self) -> bytes:
        while True:
            try:
                ready: bytes = await self._handle.describe.remote()
                return ready
            except RayActorError as error:
                logger.warning("a replica died before it could tell what it serves: %s", error)

    async def generate(self, submission: bytes, key: RouteKey) -> AsyncGenerator[bytes, None]:
        response = self._streaming.generate.remote(submission, key=key)
        try:
            async for data in response:
                yield data
        except RayActorError as error:
            raise ReplicaLostError(f"the replica died: {type(error).__name__}") from error
        except DeploymentUnavailableError as error:
            raise EngineDeadError(f"no replica of this model can be started: {error}") from error
        finally:
            response.cancel()

    async def reports(self) -> list[bytes]:
        return await self._ask_all("report")

    async def reset_prefix_cache(self) -> int:
        return sum(await self._ask_all("reset_prefix_cache"))

    async def _ask_all(self, method: str) -> list[Any]:
        """Answers of the replicas; one that dies meanwhile has none.

        Raises:
            TimeoutError: one does not answer. Ray gives the answers of all or none.
        """
        response = self._handle.broadcast(method)
        try:
            answers = await response.results_async(timeout_s=BROADCAST_TIMEOUT, return_exceptions=True)
        except DeploymentUnavailableError:  # there is no replica now
            return []
        except TimeoutError:
            raise TimeoutError(f"a replica does not answer within {BROADCAST_TIMEOUT:g} s") from None
        return [answer for answer in answers if not isinstance(answer, BaseException)]
