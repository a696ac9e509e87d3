"""What a part needs of the process that it runs in."""

import fnmatch
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu import records
from benchmarks.gpu.limits import Ceilings
from benchmarks.gpu.records import Recorder
from benchmarks.gpu.settings import Settings
from pallas_kernels.gpus import Generation


class DeviceUnusableError(RuntimeError):
    """The device does not compute any more; a new process may find it well."""


@dataclass(frozen=True)
class Context:
    """A part that runs.

    Attributes:
        generation: of the device; on a CPU the one whose kernels are interpreted.
        ceilings: what the device can do, measured or published.
        started: ``time.time()`` of the run, for progress messages.
    """

    settings: Settings
    recorder: Recorder
    generation: Generation
    ceilings: Ceilings
    started: float

    @property
    def seconds_left(self) -> float:
        return self.settings.deadline - time.time()

    @property
    def compile_seconds(self) -> float:
        """For cases that compile together."""
        return min(self.settings.compile_seconds, self.seconds_left - 2)

    def say(self, text: str) -> None:
        """Progress, with the time since the start."""
        print(f"[{time.time() - self.started:5.1f} s] {text}", flush=True)

    def plan(self, names: Iterable[str]) -> list[str]:
        """Notes the cases of the part, and returns those that this process has to run."""
        wanted = [name for name in names if fnmatch.fnmatch(name, self.settings.pattern)]
        self.recorder.planned(self.settings.part, wanted)
        begun = records.read(self.settings.records).cases
        return [name for name in wanted if (self.settings.part, name) not in begun]

    def attempt(self, name: str, needed: float, run: Callable[[], Mapping[str, Any]]) -> None:
        """Runs a case, or notes that there is no time for it; what it raises is noted too.

        Args:
            needed: seconds it is expected to take.

        Raises:
            DeviceUnusableError: after a failure that concerns more than the case.
        """
        part = self.settings.part
        if self.seconds_left < needed:
            self.recorder.end(
                part,
                name,
                "skipped",
                reason=f"no time was left ({self.seconds_left:.0f} s, it needs {needed:.0f})",
            )
            self.say(f"{part}: {name}: skipped, no time left")
            return
        self.recorder.begin(part, name)
        try:
            values = run()
        except Exception as error:
            self.fail(name, error)
            return
        self.recorder.end(part, name, "ok", values)
        self.say(f"{part}: {name}: {values.get('summary', 'done')}")

    def fail(self, name: str, error: Exception) -> None:
        """Notes the failure of a case.

        Raises:
            DeviceUnusableError: the device does not answer.
        """
        message = " ".join(f"{type(error).__name__}: {error}".split())
        self.recorder.end(self.settings.part, name, "failed", reason=message[:300])
        self.say(f"{self.settings.part}: {name}: FAILED: {message[:200]}")
        traceback.print_exception(error, limit=-6, file=sys.stderr)
        try:
            healthy = int(jnp.arange(8).sum().block_until_ready()) == 28
        except jax.errors.JaxRuntimeError:
            healthy = False
        if not healthy:
            raise DeviceUnusableError(message)
