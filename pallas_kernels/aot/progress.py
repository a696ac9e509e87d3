"""One line that says how far a long run is."""

import sys
import time
from typing import TextIO


class Progress:
    """A bar that is drawn over itself in a terminal; elsewhere a line now and then.

    Args:
        total: number of steps.
        seconds: between two lines, where there is no terminal.
    """

    def __init__(self, total: int, stream: TextIO = sys.stderr, *, seconds: float = 20.0) -> None:
        self._total = total
        self._stream = stream
        self._seconds = seconds
        self._started = self._written = time.monotonic()

    def show(self, done: int, label: str) -> None:
        """Says that ``done`` steps are done, the last of them ``label``."""
        now = time.monotonic()
        left = (now - self._started) / max(done, 1) * (self._total - done)
        text = f"{done}/{self._total}, {now - self._started:.0f} s, about {left:.0f} s left"
        if self._stream.isatty():
            filled = 24 * done // self._total
            bar = "#" * filled + "." * (24 - filled)
            end = "\n" if done == self._total else ""
            self._stream.write(f"\r\x1b[K[{bar}] {text}: {label[:60]}{end}")
        elif now - self._written >= self._seconds or done == self._total:
            self._written = now
            self._stream.write(f"{text}\n")
        self._stream.flush()
