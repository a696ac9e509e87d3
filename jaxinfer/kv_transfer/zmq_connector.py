"""The ``KVConnector`` of real engines: messages over ZeroMQ, content over a transport."""

from collections.abc import Callable
from concurrent.futures import Future

from jaxinfer.config_disaggregation import DisaggregationConfig
from jaxinfer.kv_transfer.connector import Blocks, Event, Job, drained
from jaxinfer.kv_transfer.fetch_client import FetchClient
from jaxinfer.kv_transfer.job_server import JobServer
from jaxinfer.kv_transfer.layout import BlockLayout, EngineCard
from jaxinfer.kv_transfer.messages import Ask
from jaxinfer.kv_transfer.payload import Payload
from jaxinfer.kv_transfer.transport import Receiver, Sender
from jaxinfer.kv_transfer.transports.host import HostReceiver, HostSender
from jaxinfer.observability.snapshot import TransferStats


class ZmqConnector:
    """Has an end for each direction of the engine's role."""

    def __init__(
        self, config: DisaggregationConfig, layout: BlockLayout, model: str, fingerprint: str
    ) -> None:
        self.stats = TransferStats()
        card = EngineCard(model, fingerprint, layout, config.transport, config.quantization)
        payload = Payload(layout, config.quantization == "int8")
        sender, receiver = _transport(config)
        self.server: JobServer | None = None
        self.client: FetchClient | None = None
        if config.prefills:
            self.server = JobServer(
                config.bind,
                card,
                payload,
                sender(),
                self.stats,
                max_buffered=config.max_buffered,
            )
        if config.decodes:
            self.client = FetchClient(
                config.peers,
                card,
                payload,
                receiver,
                self.stats,
                heartbeat=config.heartbeat,
                timeout=config.timeout,
                connect_timeout=config.connect_timeout,
            )

    @property
    def available(self) -> bool:
        return self.client is not None and self.client.available

    def start(self, on_event: Callable[[Event], None]) -> None:
        try:
            if self.server is not None:
                self.server.start(on_event)
            if self.client is not None:
                self.client.start(on_event)
        except BaseException:
            self.close()
            raise

    def load(self, ask: Ask) -> None:
        assert self.client is not None, "only an engine that decodes fetches"
        self.client.load(ask)

    def cancel(self, fetch: int) -> None:
        assert self.client is not None, "only an engine that decodes fetches"
        self.client.cancel(fetch)

    def save(self, job: Job, blocks: Blocks) -> None:
        assert self.server is not None, "only an engine that prefills has jobs"
        self.server.save(job, blocks)

    def finished(self, job: Job, error: str | None) -> None:
        assert self.server is not None, "only an engine that prefills has jobs"
        self.server.finished(job, error)

    def drain(self) -> Future[None]:
        return drained() if self.server is None else self.server.drain()

    def close(self) -> None:
        for end in (self.client, self.server):
            if end is not None:
                end.close()


def _transport(config: DisaggregationConfig) -> tuple[Callable[[], Sender], Callable[[], Receiver]]:
    """What makes both ends of the transport that is configured."""
    match config.transport:
        case "jax":
            from jaxinfer.kv_transfer.transports.jax_transfer import JaxReceiver, JaxSender

            return (
                lambda: JaxSender(config.data_host, 2 * config.timeout),
                lambda: JaxReceiver(config.data_host, config.timeout),
            )
        case "nixl":
            from jaxinfer.kv_transfer.transports.nixl import NixlReceiver, NixlSender

            return (lambda: NixlSender(config.timeout), lambda: NixlReceiver(config.timeout))
    return HostSender, HostReceiver
