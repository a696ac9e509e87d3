"""The requests of one ``submit`` on their way: from replica to replica, until each of them has ended."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.engine.client import EngineDeadError, EngineDrainingError, EngineRequest
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.kv_cache.digests import prefix_digests
from jaxinfer.request import FinishReason, QueueFullError, RequestError
from serve.replicas import wire
from serve.replicas.continuation import Progress, continued, lost_message, obstacle
from serve.replicas.policy import RouteKey
from serve.replicas.transport import ReplicaLostError, Transport

logger = logging.getLogger(__name__)

RETRY_DELAY = 0.05
"""Seconds before a second attempt; it doubles with each further one."""


@dataclass(frozen=True)
class FlightRules:
    """Attributes:
    block_size: tokens of a cached block; 0 where prefixes are not cached.
    continues: requests that have begun go on elsewhere, where that is exact.
    max_attempts: replicas that a request is tried on.
    """

    block_size: int
    continues: bool
    max_attempts: int
    speculative: SpeculativeConfig


class _RefusedError(Exception):
    """A replica did not take the requests; the reason is the cause."""

    def __init__(self, replica: str, reason: Exception) -> None:
        super().__init__(str(reason))
        self.replica = replica
        self.reason = reason


class Flight:
    """One submission.

    All requests of it run on one replica, until that is lost: then those that have delivered nothing are tried on
    another one, and the others go on there or end with an error.

    Args:
        keys: what the requests are called in the deltas that are delivered.
        tag: makes the ids unique among all ingresses.
        deliver: takes news.
        recall: takes them back, unless the reader has some.
    """

    def __init__(
        self,
        requests: Sequence[EngineRequest],
        keys: Sequence[str],
        tag: str,
        transport: Transport,
        rules: FlightRules,
        deliver: Callable[[list[OutputDelta]], None],
        recall: Callable[[str], bool],
    ) -> None:
        self._open = {key: Progress.of(request) for key, request in zip(keys, requests, strict=True)}
        self._tag = tag
        self._transport = transport
        self._rules = rules
        self._deliver = deliver
        self._recall = recall
        self._tried: set[str] = set()
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when a replica has taken the requests; holds what was wrong if none did."""
        self._task = asyncio.create_task(self._run(), name="flight")

    @property
    def done(self) -> "asyncio.Task[None]":
        return self._task

    def drop(self, key: str) -> list[OutputDelta]:
        """Ends a request for its reader; returns its last deltas. The replica is told when no request is left."""
        progress = self._open.pop(key, None)
        if not self._open:
            self._task.cancel()
        return [] if progress is None else _last(key, progress, FinishReason.ABORT)

    async def _run(self) -> None:
        try:
            await self._attempts()
        except Exception as error:  # handed to who submits, or to the readers
            reason = error.reason if isinstance(error, _RefusedError) else error
            if not self.admitted.done():
                self.admitted.set_exception(_for_caller(reason))
                return
            logger.warning("requests could not be answered: %s", reason)
            self._fail(self._open, f"no other replica took the request: {reason}")
        finally:
            if not self.admitted.done():
                self.admitted.cancel()

    async def _attempts(self) -> None:
        for attempt in range(self._rules.max_attempts):
            last = attempt == self._rules.max_attempts - 1
            if attempt:
                await asyncio.sleep(RETRY_DELAY * 2 ** (attempt - 1))
            try:
                await self._attempt(attempt)
            except _RefusedError as error:
                self._tried.add(error.replica)
                if last or not isinstance(error.reason, QueueFullError):
                    raise
            except ReplicaLostError as error:
                if error.replica is not None:
                    self._tried.add(error.replica)
                self._end_what_cannot_go_on()
                if last:
                    raise
            if not self._open:
                return

    async def _attempt(self, attempt: int) -> None:
        """Runs all open requests on one replica.

        Raises:
            _RefusedError: it did not take them.
            ReplicaLostError: not all of them have ended.
        """
        names: dict[str, str] = {}
        requests = []
        for key, progress in self._open.items():
            request = continued(progress) if progress.began else progress.request
            assert request is not None
            name = f"{key}@{self._tag}.{attempt}"
            names[name] = key
            requests.append(replace(request, request_id=name))
        replica: str | None = None
        submission = bytes(wire.encode_requests(requests))
        async with aclosing(self._transport.generate(submission, self._route(requests))) as messages:
            async for data in messages:
                match wire.decode_message(data):
                    case wire.Admitted(name):
                        replica = name
                        if not self.admitted.done():
                            self.admitted.set_result(None)
                    case wire.Refused(name, failure):
                        raise _RefusedError(name, failure.error())
                    case wire.News(deltas):
                        self._take(deltas, names)
                        await asyncio.sleep(0)  # the reader's turn
                    case wire.Lost(message):
                        raise ReplicaLostError(message, replica)
        if self._open:
            raise ReplicaLostError("the replica ended its stream early", replica)

    def _route(self, requests: Sequence[EngineRequest]) -> RouteKey:
        size, first = self._rules.block_size, requests[0]
        digests: list[bytes] = []
        if size:
            with suppress(TypeError, OverflowError):  # no token ids; the replica says so
                digests = prefix_digests(first.prompt_token_ids, size, first.cache_salt)
        tokens = sum(len(request.prompt_token_ids) for request in requests)
        return RouteKey(tuple(digests), tokens, max(size, 1), frozenset(self._tried))

    def _take(self, deltas: Iterable[OutputDelta], names: dict[str, str]) -> None:
        known = []
        for delta in deltas:
            key = names[delta.request_id]
            progress = self._open.get(key)
            if progress is None:  # dropped meanwhile
                continue
            delta.request_id = key
            progress.note(delta)
            if not progress.open:
                del self._open[key]
            known.append(delta)
        if known:
            self._deliver(known)

    def _end_what_cannot_go_on(self) -> None:
        for key, progress in list(self._open.items()):
            if not progress.began:
                continue
            if self._recall(key):
                self._open[key] = Progress.of(progress.request)
                continue
            because = obstacle(progress.request, self._rules.speculative)
            if not self._rules.continues or because is not None:
                self._fail([key], lost_message(because if self._rules.continues else None))
            elif continued(progress) is None:
                del self._open[key]
                self._deliver(_last(key, progress, FinishReason.LENGTH))

    def _fail(self, keys: Iterable[str], message: str) -> None:
        for key in list(keys):
            self._deliver(_last(key, self._open.pop(key), FinishReason.ERROR, message))


def _last(key: str, progress: Progress, reason: FinishReason, error: str | None = None) -> list[OutputDelta]:
    return [OutputDelta(key, i, finish_reason=reason, error=error) for i in sorted(progress.open)]


def _for_caller(error: Exception) -> Exception:
    """What ``submit`` may raise."""
    if isinstance(error, RequestError | QueueFullError | EngineDrainingError | EngineDeadError):
        return error
    if isinstance(error, ReplicaLostError):
        return EngineDeadError(f"every replica that was tried was lost: {error}")
    return error
