"""The engine process: builds the engine, runs its loop, and talks to the API process."""

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import zmq

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.config import EngineConfig
from jaxinfer.engine.admission import Admission
from jaxinfer.engine.build import Engine
from jaxinfer.engine.client import EngineDeadError
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.engine.loop import EngineLoop
from jaxinfer.engine.model_setup import Progress
from jaxinfer.engine.snapshots import block_owners, take_snapshot
from jaxinfer.hosts.gang import leave
from jaxinfer.observability.profiler import Profiler
from jaxinfer.observability.snapshot import StepRecord
from jaxinfer.request import RequestError
from serve.process import wire

Build = Callable[[EngineConfig, Progress], Engine]

HEARTBEAT = 0.5
SNAPSHOT_INTERVAL = 0.05
"""Seconds between two snapshots while steps run; more are sent when requests come and go, and when the work is done."""
STOP_TIMEOUT = 10.0


class Outbox:
    """The socket to the API process; any thread may send."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", directory: Path) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.LINGER, 2000)
        self._socket.connect(f"ipc://{directory / wire.NEWS}")
        self._lock = threading.Lock()

    def send(self, message: wire.Message) -> None:
        data = wire.encode(message)
        with self._lock:
            self._socket.send(data)

    def close(self) -> None:
        with self._lock:
            self._socket.close()


def run(directory: Path, build: Build) -> int:
    """Serves one API process until it says stop, or the engine fails; returns the exit status."""
    setup = wire.decode_setup((directory / wire.SETUP).read_bytes())
    logging.basicConfig(level=setup.log_level, stream=sys.stderr, format="%(message)s")
    config = EngineConfig.model_validate_json(setup.config)
    context = zmq.Context()
    outbox = Outbox(context, directory)
    commands = context.socket(zmq.PULL)
    commands.set(zmq.RCVHWM, 0)
    commands.connect(f"ipc://{directory / wire.COMMANDS}")  # done long before the first command
    try:
        engine = _build(config, build, outbox)
        status = 1 if engine is None else EngineServer(engine, commands, outbox).serve()
    finally:
        commands.close(linger=0)
        outbox.close()
        context.term()
    if config.hosts.several:
        leave(status)
    return status


def _build(config: EngineConfig, build: Build, outbox: Outbox) -> Engine | None:
    try:
        engine = build(config, lambda what, done, total: outbox.send(wire.Progress(what, done, total)))
    except (CheckpointError, ValueError) as error:  # ValueError: as the command line takes it
        outbox.send(wire.Failed(str(error), user_error=True))
        return None
    except Exception as error:
        logging.getLogger(__name__).exception("the engine could not be built")
        outbox.send(wire.Failed(f"{type(error).__name__}: {error}"))
        return None
    gc.collect()
    gc.freeze()  # a full collection that walks over all of this would stop the loop for 0.2 s
    return engine


class EngineServer:
    """Turns commands into calls of the loop, and news of the loop into messages."""

    def __init__(self, engine: Engine, commands: "zmq.Socket[bytes]", outbox: Outbox) -> None:
        self._engine = engine
        self._commands = commands
        self._outbox = outbox
        self._loop = EngineLoop(engine.core, self._on_turn, self._on_end)
        self._profiler = Profiler()
        self._admission = Admission(engine.inputs, engine.core, self._loop)
        self._workers = ThreadPoolExecutor(1, thread_name_prefix="jaxinfer-profile")
        self._snapshot_time = 0.0
        self._snapshot_requests = (0, 0, 0)
        self._reported_steps = 0

    def serve(self) -> int:
        engine = self._engine
        engine.gang.on_end(lambda message: self._outbox.send(wire.Failed(message)))
        self._loop.start()
        self._outbox.send(wire.Ready.of(engine))
        self._outbox.send(wire.News([], take_snapshot(engine.core, engine.compilations, ())))
        beat = 0.0
        while self._loop.error is None:
            now = time.monotonic()
            if now - beat >= HEARTBEAT:
                self._outbox.send(wire.Beat(self._loop.stalled_for))
                beat = now
            if self._commands.poll(int(1000 * HEARTBEAT)):
                command = wire.decode_command(self._commands.recv())
                if isinstance(command, wire.Stop):
                    break
                self._execute(command)
        failed = self._loop.error is not None
        self._admission.close()
        self._loop.stop()
        stopped = self._loop.join(STOP_TIMEOUT)
        self._workers.shutdown(wait=False, cancel_futures=True)
        if failed:
            engine.gang.part(f"rank 0 failed: {self._loop.error}")
        else:
            engine.gang.part(None if stopped else "rank 0 was stopped in the middle of a step")
        return 0 if stopped and not failed else 1

    # ---- commands

    def _execute(self, command: wire.Command) -> None:
        match command:
            case wire.Submit():
                self._submit(command)
            case wire.Abort():
                self._admission.abort(command.keys)
            case wire.Call():
                self._call(command)

    def _submit(self, command: wire.Submit) -> None:
        try:
            requests = wire.decode_requests(command.requests)
        except RequestError as error:
            self._outbox.send(wire.Reply(command.number, failure=wire.Failure.of(error)))
        else:
            submitted = self._admission.submit(command.keys, requests)
            submitted.add_done_callback(lambda done: self._reply(command.number, done))

    def _call(self, command: wire.Call) -> None:
        kv = self._engine.core.scheduler.kv
        future: Future[Any]
        match command.operation:
            case "reset_prefix_cache":
                future = self._loop.call(kv.reset_prefix_cache)
            case "block_owners":
                future = self._loop.call(lambda: block_owners(kv))
            case "drain":
                future = self._engine.core.drain()
            case "start_profile":
                future = self._workers.submit(self._profiler.start, command.argument)
            case "stop_profile":
                future = self._workers.submit(self._profiler.stop)
        future.add_done_callback(lambda done: self._reply(command.number, done))

    def _reply(self, number: int, done: "Future[Any]") -> None:
        error = done.exception()
        if error is None:
            self._outbox.send(wire.Reply(number, done.result()))
        else:
            self._outbox.send(wire.Reply(number, failure=wire.Failure.of(error)))

    # ---- loop thread

    def _on_turn(self, deltas: list[OutputDelta]) -> None:
        now = time.monotonic()
        core = self._engine.core
        stats = core.stats
        requests = (stats.requests_admitted, stats.requests_rejected, core.num_requests)
        due = (
            now - self._snapshot_time >= SNAPSHOT_INTERVAL
            or not core.has_work
            or requests != self._snapshot_requests
        )
        snapshot = None
        if due:
            self._snapshot_time, self._snapshot_requests = now, requests
            snapshot = take_snapshot(core, self._engine.compilations, self._new_records())
        if deltas or due:
            self._outbox.send(wire.News(deltas, snapshot))

    def _new_records(self) -> list[StepRecord]:
        stats = self._engine.core.stats
        new = min(stats.steps_committed - self._reported_steps, len(stats.records))
        self._reported_steps = stats.steps_committed
        return list(stats.records)[-new:] if new else []

    def _on_end(self, error: EngineDeadError) -> None:
        self._outbox.send(wire.Failed(str(error)))
