"""A real server for measurements: ``jaxinfer serve`` in a process of its own, on the loopback address."""

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

CODE = "from serve.cli import main; main()"


@contextmanager
def server(config: str, overrides: dict[str, object], timeout: float = 900.0) -> Iterator[str]:
    """Starts a server and stops it when the block is left; yields its address.

    Args:
        config: YAML file or model reference.
        overrides: configuration values by path, such as ``scheduler.chunk_size``.
        timeout: seconds for the start, compilation included.

    Raises:
        RuntimeError: it did not start; the message ends with what it said.
    """
    values = {"server.host": "127.0.0.1", "server.port": free_port(), **overrides}
    arguments = [text for key, value in values.items() for text in (f"--{key}", str(value))]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", CODE, "serve", "--config", config, *arguments], stdout=log, stderr=log
        )
        try:
            url = f"http://127.0.0.1:{values['server.port']}"
            if not _answers(url, process, timeout):
                log.seek(0)
                raise RuntimeError(f"the server did not start: {log.read()[-2000:]}")
            yield url
        finally:
            _stop(process)


def _answers(url: str, process: subprocess.Popen[bytes], timeout: float) -> bool:
    end = time.monotonic() + timeout
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5.0).status_code == 200:
                return True
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
