"""Compiles each program in a process of its own, because some errors of LLVM and Triton end the process.

The processes are forked from one that has imported JAX but started no backend, which saves the 2 s of the import.
"""

import contextlib
import importlib
import multiprocessing
import os
import re
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from pallas_kernels.aot.compile import Program, compile_program, prepare_environment
from pallas_kernels.aot.inspect import ProgramFacts
from pallas_kernels.gpus import GPUS

_LOG = "log.txt"
_ERROR_LINES = re.compile(r"LLVM (Fatal|ERROR)|Error|error:|Check failed|Assertion", re.IGNORECASE)


@dataclass(frozen=True)
class Job:
    """A program to compile.

    Attributes:
        target: "package.module:function", which makes the ``Program`` in the new process.
        args: of that function.
        gpu: a name in ``gpus.GPUS``.
    """

    target: str
    args: tuple[Any, ...]
    gpu: str


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        facts: None if it failed.
        donated_bytes: of the program's donated arguments, per device.
        error: empty if it did not fail.
    """

    job: Job
    facts: ProgramFacts | None
    donated_bytes: int
    error: str


def run_isolated(
    jobs: Sequence[Job], *, processes: int = 2, timeout: float = 600.0, preload: Sequence[str] = ()
) -> Iterator[Outcome]:
    """Runs jobs, ``processes`` at a time; yields them as they end.

    Args:
        timeout: seconds for one job.
        preload: modules that all jobs need, imported once. They must not start a JAX backend.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *preload])
    waiting = list(reversed(jobs))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                running.append(_Running(context, waiting.pop(), timeout))
            connection.wait([child.results for child in running], timeout=1.0)
            ended = [child for child in running if child.ended()]
            for child in ended:
                running.remove(child)
                yield child.outcome()
    finally:
        for child in running:
            child.stop()


class _Running:
    """A job in its process."""

    def __init__(self, context: Any, job: Job, timeout: float) -> None:
        self.job = job
        self._timeout = timeout
        # Owned by this process: the other one may be gone before it can clean up.
        self._folder = tempfile.TemporaryDirectory(prefix="aot_")
        self.results, write = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(job, write, self._folder.name), daemon=True)
        self._deadline = time.monotonic() + timeout
        self._process.start()
        write.close()

    def ended(self) -> bool:
        return self.results.poll() or time.monotonic() > self._deadline

    def outcome(self) -> Outcome:
        facts, donated, error = None, 0, ""
        try:
            if self.results.poll():
                facts, donated, error = self.results.recv()
            else:
                error = f"did not end within {self._timeout:.0f} s"
        except EOFError:
            self._process.join(5)
            error = f"the compiler ended the process ({self._process.exitcode}): {self._last_error()}"
        self.stop()
        return Outcome(self.job, facts, donated, error)

    def stop(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self.results.close()
        self._folder.cleanup()

    def _last_error(self) -> str:
        lines = (Path(self._folder.name) / _LOG).read_text(errors="replace").splitlines()
        errors = [line.strip() for line in lines if _ERROR_LINES.search(line)]
        return (errors or lines or ["no message"])[-1][-300:]


def _work(job: Job, results: Any, folder: str) -> None:
    """Runs in the new process."""
    dumps = Path(folder) / "dumps"
    dumps.mkdir()
    with (Path(folder) / _LOG).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    answer: tuple[ProgramFacts | None, int, str]
    try:
        prepare_environment(dumps)
        module, function = job.target.split(":")
        program = getattr(importlib.import_module(module), function)(*job.args)
        assert isinstance(program, Program)
        facts = compile_program(program, GPUS[job.gpu], dumps)
        answer = (facts, program.donated_bytes, "")
    except Exception as error:
        traceback.print_exc()
        answer = (None, 0, _short(error))
    with contextlib.suppress(BrokenPipeError):
        results.send(answer)
    results.close()


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])}"[:400]
