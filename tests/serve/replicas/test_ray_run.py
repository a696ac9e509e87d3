"""What ``jaxinfer serve --replicas ray`` does with Ray, which is not started here."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="the extra ray is not installed; make test-replicas installs it")

from ray import serve  # noqa: E402
from ray.serve._private.common import DeploymentID  # noqa: E402
from ray.serve.exceptions import DeploymentUnavailableError  # noqa: E402

from jaxinfer.config_values import ConfigError  # noqa: E402
from serve.replicas import ray_app, ray_run  # noqa: E402
from serve.replicas.config import ScalingConfig  # noqa: E402
from serve.replicas.ray_transport import RayTransport  # noqa: E402
from serve.replicas.run import load  # noqa: E402
from tests.serve.replicas.test_config import ONE  # noqa: E402

# Slow tests are what has Ray.
pytestmark = [pytest.mark.slow, pytest.mark.feature("replicas")]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of what was called, without ``serve.run``."""
    made: list[str] = []

    def record(name: str) -> Callable[..., None]:
        return lambda *_, **__: made.append(name)

    monkeypatch.setattr(ray, "init", record("init"))
    monkeypatch.setattr(ray, "shutdown", record("shutdown"))
    for name in ("start", "delete", "shutdown"):
        monkeypatch.setattr(serve, name, record(f"serve.{name}"))
    monkeypatch.setattr(ray_run, "gpus_of_cluster", lambda: 0.0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    yield made
    for signum, handler in before.items():
        signal.signal(signum, handler)


ALL = ["init", "serve.start", "serve.delete", "serve.shutdown", "shutdown"]


def test_a_signal_ends_a_start(calls, monkeypatch):
    monkeypatch.setattr(serve, "run", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        ray_run.run(load(ONE, {}))
    assert caught.value.code == 143
    assert calls == ALL


def test_what_ray_cannot_start_is_logged(calls, monkeypatch, caplog):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Deploying application jaxinfer failed: no such file")

    monkeypatch.setattr(serve, "run", fail)
    assert ray_run.run(load(ONE, {})) == 1
    assert calls == ALL
    assert "cannot be started: Deploying application" in caplog.text


def test_a_machine_without_room_is_left_at_once(calls, monkeypatch):
    monkeypatch.setattr(ray_run, "gpus_of_cluster", lambda: 1.0)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(ConfigError, match="need 2 GPUs"):
        ray_run.run(load(ONE, {}))
    assert calls == ["init", "serve.shutdown", "shutdown"]


@pytest.mark.filterwarnings("error")
def test_scaling_settings_are_none_that_ray_gives_up():
    scaling = ScalingConfig(max_replicas=2, look_back=11)
    assert ray_app._autoscaling(scaling).look_back_period_s == 11


class Handle:
    """A deployment handle whose broadcast ends with an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def options(self, **_: Any) -> "Handle":
        return self

    def broadcast(self, _: str) -> "Handle":
        return self

    async def results_async(self, **_: Any) -> list[bytes]:
        raise self._error


def test_reports_of_replicas_that_hang_or_are_gone():
    gone = RayTransport(Handle(DeploymentUnavailableError(DeploymentID("m"))))  # type: ignore[arg-type]
    assert asyncio.run(gone.reports()) == []
    assert asyncio.run(gone.reset_prefix_cache()) == 0
    hanging = RayTransport(Handle(TimeoutError()))  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match="does not answer within 5 s"):
        asyncio.run(hanging.reports())
