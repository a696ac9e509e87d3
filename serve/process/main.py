"""Entry point of the engine process: ``python -m serve.process.main DIRECTORY``, with the pipes of ``ProcessClient``.

Signals are for the API process, which tells this one when to stop. If it goes away, this process ends at once: the
other end of its standard input is closed then.
"""

import os
import shutil
import signal
import sys
import threading
from pathlib import Path


def guard(directory: Path) -> None:
    """Ignores signals, and ends the process when its parent is gone. To be called before anything that takes long.

    Args:
        directory: the private directory, which nobody else removes then.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    thread = threading.Thread(target=_end_with_parent, args=(directory,), name="jaxinfer-parent", daemon=True)
    thread.start()


def _end_with_parent(directory: Path) -> None:
    while os.read(0, 1024):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    private = Path(sys.argv[1])
    guard(private)
    from jaxinfer.engine.build import build_engine
    from serve.process.server import run

    sys.exit(run(private, build_engine))
