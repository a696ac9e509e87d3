"""Runs one part in a process of its own, and starts it again without the case that ended it.

A compiler may abort its process, a kernel may leave the device unusable for it, and either may hang: none of that may
cost more than the case at fault.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu import records
from benchmarks.gpu.records import Recorder
from benchmarks.gpu.settings import CASE_SECONDS, Settings

ROOT = Path(__file__).resolve().parents[2]
MAX_STARTS = 12
POLL_SECONDS = 0.1
UNUSABLE = 3
"""Exit code of a worker whose device does not answer any more."""


def run_part(
    settings: Settings, deadline: float, changed: Callable[[], None], case_seconds: float | None = None
) -> None:
    """Runs a part until it is done or its time is over; every planned case has an end in the records then.

    Args:
        settings: their deadline is the one that the worker plans with; it is a little earlier than the one enforced.
        deadline: ``time.time()`` at which the worker is ended.
        changed: called when there are new records.
        case_seconds: the most a case may take.
    """
    part, recorder = settings.part, Recorder(settings.records)
    limit = CASE_SECONDS[part] if case_seconds is None else case_seconds
    reason, failed = "no time was left", False
    for _ in range(MAX_STARTS):
        if time.time() >= settings.deadline:
            break
        outcome = _run_worker(settings, deadline, limit, changed)
        open_cases = records.read(settings.records).open_cases(part)
        for name in open_cases:
            recorder.end(part, name, "failed", reason=outcome)
        if outcome == "done":
            reason = "it was left out by the part"
            break
        if not open_cases and "unusable" not in outcome:
            if settings.serial:
                reason, failed = f"the part could not go on: {outcome}", True
                break
            # Several cases compile at a time: one after the other, the one at fault shows.
            settings = replace(settings, serial=True)
    _close(recorder, settings, reason, failed)
    changed()


def _close(recorder: Recorder, settings: Settings, reason: str, failed: bool) -> None:
    """Gives what was not begun its end; a part that failed as a whole, or planned nothing, counts as a case."""
    results = records.read(settings.records)
    for name in results.untouched(settings.part):
        recorder.end(settings.part, name, "skipped", reason=reason)
    if failed or settings.part not in results.planned:
        recorder.end(settings.part, "(all)", "failed" if failed else "skipped", reason=reason)


def _run_worker(settings: Settings, deadline: float, limit: float, changed: Callable[[], None]) -> str:
    """Returns "done", or why the process ended."""
    command = [sys.executable, "-m", "benchmarks.gpu.worker", settings.to_json()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    size, progress_at = -1, time.time()
    try:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            now = time.time()
            new_size = settings.records.stat().st_size if settings.records.exists() else 0
            if new_size != size:
                size, progress_at = new_size, now
                changed()
            if now >= deadline:
                return "its part's time was over"
            if now - progress_at > limit and records.read(settings.records).open_cases(settings.part):
                return f"no result after {limit:.0f} s"
    finally:
        _end(process)
    if process.returncode == 0:
        return "done"
    if process.returncode == UNUSABLE:
        return "the device became unusable"
    if process.returncode < 0:
        return f"it ended its process by {signal.Signals(-process.returncode).name}"
    return f"its process ended with exit code {process.returncode}"


def _end(process: subprocess.Popen) -> None:
    """Ends the worker and what it started, compilers for instance; it has a process group of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            continue
