"""JAX's persistent compilation cache, and a counter of compilations."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import jax
import jax.monitoring

logger = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class RecompilationError(RuntimeError):
    """Something was compiled after warm-up, and the configuration makes that an error."""


def use_compilation_cache(directory: str) -> None:
    """Switches the persistent cache on for every program, small and quick ones included; "none" leaves it off."""
    if directory == "none":
        return
    path = Path(directory).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextmanager
def unoptimized() -> Iterator[None]:
    """Programs of all threads are compiled without LLVM's optimizations meanwhile: for those that hardly run."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


class CompilationMonitor:
    """Counts programs that the process compiles after ``arm``: after a full warm-up there should be none.

    Args:
        reaction: what a compilation does: nothing, a warning, or an error at the next ``check``.
    """

    def __init__(self, reaction: Literal["allow", "warn", "error"]) -> None:
        self._reaction = reaction
        self._armed = False
        self._count = 0
        self._reported = 0

    @property
    def count(self) -> int:
        """Compilations since ``arm``."""
        return self._count

    def arm(self) -> None:
        """Starts to count; until ``close``."""
        if not self._armed:
            jax.monitoring.register_event_duration_secs_listener(self._on_event)
        self._armed = True
        self._count = 0

    def close(self) -> None:
        """Stops counting."""
        if self._armed:
            jax.monitoring.unregister_event_duration_listener(self._on_event)
        self._armed = False

    def check(self) -> None:
        """Called after a step.

        Raises:
            RecompilationError: under ``error``, if something was compiled.
        """
        if self._count == self._reported:
            return
        new, self._reported = self._count - self._reported, self._count
        message = f"{new} programs were compiled after warm-up"
        if self._reaction == "error":
            raise RecompilationError(message)
        if self._reaction == "warn":
            logger.warning("%s", message)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            self._count += 1
