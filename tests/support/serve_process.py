"""A real server in a process of its own, with a tiny model or a simulated one."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.tiny_checkpoint import MAX_MODEL_LEN

START_TIMEOUT = 180.0
_SMALL = {
    "model.max-model-len": MAX_MODEL_LEN,
    "cache.num-blocks": 2048,
    "compile.warm-up": "lazy",
    "scheduler.max-num-batched-tokens": 32,
    "scheduler.max-num-seqs": 4,
}


@dataclass
class ServeProcess:
    """Attributes:
    folder: where it keeps temporary files.
    errors: what it wrote to stderr so far.
    """

    process: subprocess.Popen[str]
    folder: Path
    errors: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def engine_pid(self) -> int:
        """Of the engine process: the only child."""
        (child,) = self.child_pids
        return child

    @property
    def child_pids(self) -> list[int]:
        return [int(child.pid) for child in psutil.Process(self.process.pid).children()]

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20)

    def complete(self, **values: Any) -> httpx.Response:
        return httpx.post(self.url + "/v1/completions", json={"prompt": "hi", **values}, timeout=60)

    def exit_status(self, timeout: float) -> int:
        return self.process.wait(timeout)

    def private_files(self) -> list[Path]:
        """Private directories of engine processes."""
        return list(self.folder.glob("jaxinfer-*"))

    def text(self) -> str:
        return "".join(self.errors)


@contextlib.contextmanager
def serve_process(
    model: Path, options: dict[str, Any] | None = None, wait: bool = True, simulated: bool = True
) -> Iterator[ServeProcess]:
    """Starts the server, waits for its URL unless told otherwise, and leaves no process behind.

    Args:
        model: written by ``tiny_checkpoint``.
        options: configuration values by dotted path.
        simulated: the model is not loaded, only its tokenizer: steps of 2 ms give random tokens.
    """
    given = {
        "model.reference" if simulated else "model": model,
        **_SMALL,
        "server.port": 0,
        **(options or {}),
    }
    arguments = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    run = (
        ["-m", "tests.support.engine_process"] if simulated else ["-c", "from serve.cli import main; main()"]
    )
    folder = Path(tempfile.mkdtemp(prefix="serve-"))
    process = subprocess.Popen(
        [sys.executable, *run, "serve", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    server = ServeProcess(process, folder)
    reader = threading.Thread(target=_read, args=(server,), daemon=True)
    reader.start()
    try:
        if wait:
            _wait_for_url(server)
        yield server
    finally:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in children:
                child.kill()
        process.wait(20)
        reader.join(20)
        shutil.rmtree(folder, ignore_errors=True)


def _read(server: ServeProcess) -> None:
    assert server.process.stderr is not None
    for line in server.process.stderr:
        server.errors.append(line)
        found = re.fullmatch(r"serving \S+ at (http://\S+)\n", line)
        if found:
            server.url = found[1]


def _wait_for_url(server: ServeProcess) -> None:
    end = time.monotonic() + START_TIMEOUT
    while not server.url:
        assert server.process.poll() is None, f"the server ended:\n{server.text()}"
        assert time.monotonic() < end, f"the server did not start:\n{server.text()}"
        time.sleep(0.05)


class EventReader:
    """A stream that is read on a thread: its events, and how it ended."""

    def __init__(self, server: ServeProcess, **values: Any) -> None:
        self.events: list[str] = []
        self.failure: Exception | None = None
        self._body = {"prompt": "hi", "stream": True, "ignore_eos": True, **values}
        self._url = server.url + "/v1/completions"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait_for(self, count: int) -> None:
        """Until so many events are there."""
        end = time.monotonic() + 60
        while len(self.events) < count:
            assert time.monotonic() < end, "the events do not come"
            time.sleep(0.005)

    def finish(self, timeout: float) -> list[Any]:
        """All events, the JSON ones parsed."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the stream did not end"
        assert self.failure is None, self.failure
        return [event if event == "[DONE]" else json.loads(event) for event in self.events]

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
        except Exception as error:  # shown by finish
            self.failure = error


def is_gone(pid: int, timeout: float) -> bool:
    """Whether a process, which need not be a child of this one, ends in time."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False
