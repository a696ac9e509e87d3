"""Compiles ahead in threads: XLA compiles outside the interpreter's lock, and a device's time is short."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Job:
    """Something named to compile."""

    name: str
    compile: Callable[[], Any]


def lower(function: Any, *shapes: Any) -> jax.stages.Lowered:
    """``function.lower`` of a jitted function that is declared as a plain one."""
    lowered: jax.stages.Lowered = function.lower(*shapes)
    return lowered


def compile_all(jobs: Iterable[Job], threads: int, timeout: float) -> dict[str, Future]:
    """Compiles in threads; the results, or what they raised, by name.

    Args:
        timeout: seconds; what is not compiled by then raises TimeoutError from its ``result(0)``.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="compile")
    futures: dict[str, Future] = {job.name: pool.submit(job.compile) for job in jobs}
    pool.shutdown(wait=False, cancel_futures=False)
    wait(futures.values(), timeout=max(timeout, 0.0))
    for future in futures.values():
        future.cancel()
    return futures


def batches(items: list[Any], size: int) -> list[list[Any]]:
    """Consecutive items, ``size`` at a time."""
    return [items[i : i + size] for i in range(0, len(items), size)]
