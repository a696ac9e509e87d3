"""ReplicasClient: the replicas of one model as one engine."""

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Self

from jaxinfer.config import EngineConfig
from jaxinfer.engine.client import EngineDeadError, EngineDrainingError, EngineRequest
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.engine.inputs import Limits
from jaxinfer.engine.streams import Stream, StreamTable
from jaxinfer.engine.validation import check
from jaxinfer.observability.snapshot import EngineSnapshot
from jaxinfer.request import RequestError
from jaxinfer.tokenization.chat import ChatTemplate
from jaxinfer.tokenization.tokenizer import Tokenizer
from serve.front_end import FrontEnd, load_front_end
from serve.process.wire import Ready
from serve.replicas import wire
from serve.replicas.config import ModelPool
from serve.replicas.flight import Flight, FlightRules
from serve.replicas.totals import total
from serve.replicas.transport import Transport

logger = logging.getLogger(__name__)

KEEP_REPORTS = 120.0
"""Seconds for which old reports stand for replicas that cannot be asked. One that hangs lets nobody be heard, and is
replaced after three health checks of 30 s."""


class ReplicasClient:
    """An ``EngineClient`` of an ingress; made by ``start``.

    A replica that is lost is somebody else's to replace, so this engine is never dead: its requests are tried again
    (see ``Flight``). ``abort`` of one among several requests of a ``submit`` ends it for its reader at once, and on the
    replica together with the last of them.
    """

    def __init__(
        self, config: EngineConfig, pool: ModelPool, transport: Transport, ready: Ready, front_end: FrontEnd
    ) -> None:
        self._config = config
        self._transport = transport
        self._ready = ready
        self._front_end = front_end
        self._rules = FlightRules(
            ready.limits.block_size if config.cache.prefix_caching else 0,
            pool.on_loss == "continue",
            pool.max_attempts,
            config.speculative,
        )
        self._tag = uuid.uuid4().hex[:12]
        self._streams = StreamTable(config.server.max_buffered_tokens, self._abort_keys)
        self._flights: dict[str, Flight] = {}
        self._reports: dict[str, wire.Report] = {}
        self._reported = time.monotonic()
        self._draining = False
        self._stopped = False

    @classmethod
    async def start(cls, config: EngineConfig, pool: ModelPool, transport: Transport) -> Self:
        """Waits for a first replica."""
        ready = wire.decode_ready(await transport.describe())
        front_end = await asyncio.to_thread(load_front_end, ready, config)
        return cls(config, pool, transport, ready, front_end)

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def limits(self) -> Limits:
        return self._ready.limits

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._front_end.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        return self._front_end.chat_template

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return self._ready.sampling_defaults

    @property
    def num_requests(self) -> int:
        """Requests in flight, as this side knows them."""
        return len(self._streams)

    def check(self, requests: Sequence[EngineRequest]) -> None:
        check(self._front_end.inputs, requests)

    async def submit(self, requests: Sequence[EngineRequest]) -> Stream:
        self.check_ready()
        stream = self._streams.open(requests)
        keys = stream.keys
        try:
            table = self._streams
            flight = Flight(
                requests, keys, self._tag, self._transport, self._rules, table.deliver, table.recall
            )
            for key in keys:
                self._flights[key] = flight
            flight.done.add_done_callback(lambda _: self._landed(keys))
            await flight.admitted
        except OverflowError:  # an integer of more than 64 bits, which is no token id
            await stream.aclose()
            self.check(requests)
            raise
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def abort(self, request_id: str) -> None:
        key = self._streams.key(request_id)
        if key is not None:
            self._abort_keys([key])

    async def refresh(self) -> Mapping[str, wire.Report]:
        """The newest numbers of every replica, by its name. Where one does not answer, those of before, for
        ``KEEP_REPORTS`` seconds; then none."""
        try:
            answers = await self._transport.reports()
        except TimeoutError as error:
            logger.warning("numbers are old: %s", error)
            if time.monotonic() - self._reported > KEEP_REPORTS:
                self._reports = {}
            return self._reports
        self._reports = {report.replica: report for report in map(wire.decode_report, answers)}
        self._reported = time.monotonic()
        return self._reports

    @property
    def reports(self) -> Mapping[str, wire.Report]:
        """As the last ``refresh`` found them."""
        return self._reports

    def snapshot(self) -> EngineSnapshot:
        """The sum over the replicas, as the last ``refresh`` found them."""
        return total([report.snapshot for report in self._reports.values()])

    async def block_owners(self) -> tuple[int, ...]:
        """Nothing: each replica has a pool of its own."""
        return ()

    def check_health(self) -> None:
        if self._stopped:
            raise EngineDeadError("the engine was shut down")

    def check_ready(self) -> None:
        self.check_health()
        if self._draining:
            raise EngineDrainingError("the server is shutting down")

    async def reset_prefix_cache(self) -> int:
        """Raises:
        TimeoutError: a replica does not answer.
        """
        return await self._transport.reset_prefix_cache()

    async def start_profile(self, directory: str) -> None:
        raise RequestError("profiles are taken of one engine, not of several replicas")

    async def stop_profile(self) -> None:
        raise RequestError("profiles are taken of one engine, not of several replicas")

    async def drain(self, timeout: float) -> None:
        self._draining = True
        await self._streams.drain(timeout)

    async def shutdown(self) -> None:
        """Aborts what runs; the replicas stay."""
        self._stopped = True
        self._streams.end(EngineDeadError("the engine was shut down"))
        flights = set(self._flights.values())
        for flight in flights:
            flight.done.cancel()
        await asyncio.gather(*(flight.done for flight in flights), return_exceptions=True)

    def _landed(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._flights.pop(key, None)

    def _abort_keys(self, keys: Sequence[str]) -> None:
        last: list[OutputDelta] = []
        for key in keys:
            flight = self._flights.pop(key, None)
            if flight is not None:
                last += flight.drop(key)
        if last:
            asyncio.get_running_loop().call_soon(self._streams.deliver, last)
