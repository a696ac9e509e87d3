"""A headless Chromium for tests, driven by chromedriver's WebDriver protocol."""

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = None if CHROMIUM and DRIVER else "needs chromium and chromedriver"
"""Why browser tests cannot run here; None if they can."""

ENTER = "\ue007"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
)


class Browser:
    """One page in a browser of its own."""

    def __init__(self, session: httpx.Client) -> None:
        self._session = session

    def open(self, url: str) -> None:
        self._call("POST", "url", url=url)

    def run(self, script: str) -> Any:
        """The value of a script's ``return``."""
        return self._call("POST", "execute/sync", script=script, args=[])

    def wait(self, condition: str, seconds: float = 30.0) -> Any:
        """The value of a JavaScript expression as soon as it is true.

        Raises:
            AssertionError: it did not become true.
        """
        deadline = time.monotonic() + seconds
        while not (value := self.run(f"return {condition}")):
            assert time.monotonic() < deadline, f"not true after {seconds} s: {condition}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        return self.run(f"return document.querySelector({json.dumps(selector)}).textContent")

    def type(self, selector: str, text: str) -> None:
        self._call("POST", f"element/{self._find(selector)}/value", text=text)

    def click(self, selector: str) -> None:
        self._call("POST", f"element/{self._find(selector)}/click")

    def emulate(self, width: int, height: int, scheme: Literal["light", "dark"] = "light") -> None:
        """The size of the page's window in CSS pixels, and the colour scheme."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", **metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._devtools("Emulation.setEmulatedMedia", features=features)

    def screenshot(self) -> bytes:
        """PNG of the window."""
        return base64.b64decode(self._call("GET", "screenshot"))

    def console(self) -> list[str]:
        """Messages since the last call: errors, warnings, and resources that failed."""
        return [entry["message"] for entry in self._call("POST", "se/log", type="browser")]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the last call, of all resources."""
        entries = self._call("POST", "se/log", type="performance")
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def _find(self, selector: str) -> str:
        return self._call("POST", "element", using="css selector", value=selector)[_ELEMENT]

    def _devtools(self, command: str, **params: Any) -> None:
        self._call("POST", "goog/cdp/execute", cmd=command, params=params)

    def _call(self, method: str, path: str, **body: Any) -> Any:
        response = self._session.request(method, path, json=body if method == "POST" else None)
        value = response.json()["value"]
        assert response.is_success, f"{path}: {value}"
        return value


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Starts a browser with a profile of its own, and ends it."""
    assert CHROMIUM is not None
    assert DRIVER is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    quiet = subprocess.DEVNULL
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=quiet, stderr=quiet)
    try:
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client,
        ):
            _wait_ready(client)
            answer = client.post("/session", json=_capabilities(Path(profile))).json()["value"]
            session = f"http://127.0.0.1:{port}/session/{answer['sessionId']}"
            client.base_url = session + "/"
            try:
                yield Browser(client)
            finally:
                client.delete(session)
    finally:
        _end(driver)


def _end(driver: subprocess.Popen[bytes]) -> None:
    """Ends the driver, and the browser if it is still there: it would outlive its driver."""
    processes = psutil.Process(driver.pid).children(recursive=True)
    driver.terminate()
    driver.wait(10)
    _, left = psutil.wait_procs(processes, timeout=3)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _wait_ready(client: httpx.Client) -> None:
    for _ in range(200):
        try:
            client.get("/status")
            return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("chromedriver does not answer")


def _capabilities(profile: Path) -> dict[str, Any]:
    options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
    logs = {"browser": "ALL", "performance": "ALL"}
    chosen = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": logs}
    return {"capabilities": {"alwaysMatch": chosen}}
