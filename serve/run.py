"""``jaxinfer serve``: the life of a server process, from its start to its exit status."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn

from jaxinfer.config import EngineConfig, ServerConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.engine.client import EngineClient, EngineDeadError
from jaxinfer.progress import startup_bar
from serve.app import create_app
from serve.context import served_names
from serve.process.channel import ENGINE_COMMAND
from serve.process.client import EngineStartError, ProcessClient

if TYPE_CHECKING:
    from jaxinfer.engine.build import Engine
    from jaxinfer.engine.thread_client import ThreadClient

logger = logging.getLogger(__name__)
T = TypeVar("T")

BACKLOG = 2048
MAX_FILES = 65536
KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than the 60 s of common load balancers, which reuse them."""
HEALTH_INTERVAL = 0.25
DEATH_LINGER = 2.0
"""Seconds in which a server whose engine is dead still answers, so that streams and probes get to know it."""
FLUSH_TIMEOUT = 2
"""Seconds for answers on their way when the work is done."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class EngineSource:
    """Where the engine comes from; benchmarks bring theirs.

    Attributes:
        command: runs the engine process.
        build: makes the engine of a server whose step loop is a thread; runs on a thread.
    """

    command: Sequence[str]
    build: Callable[[EngineConfig, Progress], "Engine"]


def serve(config: EngineConfig, source: EngineSource | None = None) -> int:
    """Serves until it is told to stop.

    Returns:
        The exit status: 0 after a drain, 128 + signal if it was stopped at once, 1 if the engine could not be built, or
        died.

    Raises:
        ConfigError, CheckpointError, ValueError: the configuration or the model is wrong, or the port is in use.
    """
    _allow_many_connections()
    with bind(config.server) as listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            status, left_over = runner.run(Lifecycle(config, listener, source or default_source()).run())
        except EngineStartError as error:
            logger.error("the engine could not be started: %s", error)
            return 1
        if left_over:  # a thread that nobody can end must not keep the process
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return status


def _allow_many_connections() -> None:
    """Each takes a file descriptor, and the usual soft limit of 1024 is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind(server: ServerConfig) -> socket.socket:
    """A bound socket that does not listen yet: connections are refused until the engine is ready.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise _unusable(server, error) from error
    listener.setblocking(False)
    return listener


def _unusable(server: ServerConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {server.host} port {server.port}: {error.strerror or error}; "
        "choose another address with --host and --port"
    )


class Lifecycle:
    """One run of the server: start, serve, drain, stop.

    SIGTERM refuses new requests and lets those in flight end (``server.shutdown_timeout``). A second SIGTERM, and
    SIGINT, stop at once. A dead engine ends the process.
    """

    def __init__(self, config: EngineConfig, listener: socket.socket, source: EngineSource) -> None:
        self._config = config
        self._source = source
        self._listener = listener
        self._status = 0
        self._client: EngineClient | None = None
        self._server: _Server | None = None
        self._draining: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    async def run(self) -> tuple[int, bool]:
        """Returns the exit status, and whether a thread is left that cannot be ended."""
        with self._signals():
            starting = asyncio.ensure_future(self._start())
            await self._first_of(starting)
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return self._status, self._config.server.engine == "thread"
            self._client = client = starting.result()
            try:
                await self._serve(client)
            finally:
                await self._end(client)
        return self._status, any(thread.name == "jaxinfer-engine" for thread in threading.enumerate())

    async def _start(self) -> EngineClient:
        with startup_bar() as report:
            return await start_client(self._config, self._source, report)

    async def _serve(self, client: EngineClient) -> None:
        server = self._server = _Server(create_app(client, self._config), self._announce)
        gc.collect()
        gc.freeze()
        watching = asyncio.create_task(self._watch(client))
        serving = asyncio.create_task(server.serve([self._listener]))
        try:
            await self._first_of(serving)
            if not serving.done():  # stopped at once: streams end with an error before connections are closed
                watching.cancel()
                await self._end(client)
                server.should_exit = True
                await asyncio.wait([serving], timeout=FLUSH_TIMEOUT)
            else:
                serving.result()
        except OSError as error:  # another process listens since the socket was bound
            raise _unusable(self._config.server, error) from error
        finally:
            watching.cancel()
            serving.cancel()

    async def _watch(self, client: EngineClient) -> None:
        """Ends the process when the engine is dead, after a while in which everybody can see it."""
        while True:
            await asyncio.sleep(HEALTH_INTERVAL)
            try:
                client.check_health()
            except EngineDeadError as error:
                logger.error("the engine is dead, and so the server ends: %s", error)
                self._status = 1
                await asyncio.sleep(DEATH_LINGER)
                self._close()
                return

    async def _end(self, client: EngineClient) -> None:
        if self._stopped.is_set() and isinstance(client, ProcessClient):
            await client.kill()
        else:
            await client.shutdown()

    # ---- signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_terminate)
        loop.add_signal_handler(signal.SIGINT, self._stop, signal.SIGINT)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            loop.remove_signal_handler(signal.SIGINT)

    def _on_terminate(self) -> None:
        if self._client is None or self._server is None or self._draining is not None:
            self._stop(signal.SIGTERM)
        else:
            self._draining = asyncio.create_task(self._drain(self._client))

    async def _drain(self, client: EngineClient) -> None:
        timeout = self._config.server.shutdown_timeout
        logger.warning("no new requests are taken; those in flight get %g s to end", timeout)
        await client.drain(timeout)
        self._close()

    def _stop(self, signum: signal.Signals) -> None:
        self._status = 128 + signum
        self._stopped.set()

    def _close(self) -> None:
        if self._server is not None:
            self._server.should_exit = True

    async def _first_of(self, task: "asyncio.Future[Any]") -> None:
        """Waits until a task is done or the server is to stop at once."""
        stopped = asyncio.ensure_future(self._stopped.wait())
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()

    def _announce(self) -> None:
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        name = served_names(self._config)[0]
        print(f"serving {name} at http://{shown}:{port}", file=sys.stderr, flush=True)


class _Server(uvicorn.Server):
    """Leaves signals alone, and tells when it listens."""

    def __init__(self, app: Any, started: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="on",
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=FLUSH_TIMEOUT,
                log_level="warning",
                access_log=False,
                server_header=False,
            )
        )
        self._on_started = started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()


def default_source() -> EngineSource:
    """The model of the configuration."""

    def build(config: EngineConfig, report: Progress) -> "Engine":
        from jaxinfer.engine.build import build_engine

        return build_engine(config, report)

    return EngineSource(ENGINE_COMMAND, build)


async def start_client(
    config: EngineConfig, source: EngineSource, report: Progress
) -> "ProcessClient | ThreadClient":
    """Starts the engine where ``server.engine`` says.

    Raises:
        ConfigError, CheckpointError, ValueError: the configuration or the model is wrong.
        EngineStartError: the engine process could not build its engine.
    """
    if config.server.engine == "process":
        return await ProcessClient.start(config, report, source.command)
    return await _in_thread(lambda: _thread_client(source.build, config, report))


def _thread_client(
    build: Callable[[EngineConfig, Progress], "Engine"], config: EngineConfig, report: Progress
) -> "ThreadClient":
    # Imported here, as an API process has no use for JAX when the engine has a process of its own.
    from jaxinfer.engine.thread_client import ThreadClient

    return ThreadClient(build(config, report))


async def _in_thread(function: Callable[[], T]) -> T:
    """Runs a function on a daemon thread, which a process that is stopped meanwhile leaves behind."""
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(function())
        except Exception as error:  # handed to whoever waits
            result.set_exception(error)

    result.set_running_or_notify_cancel()
    threading.Thread(target=work, name="jaxinfer-build", daemon=True).start()
    return await asyncio.wrap_future(result)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop, where it exists."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
