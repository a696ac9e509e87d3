"""Entry point of a process of ``jaxinfer launch``: the command line, for as long as the launcher lives.

``python -m serve.rank serve ...``; the other end of the standard input is the launcher's.
"""

import os
import threading


def _end_with_launcher() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_launcher, name="jaxinfer-launcher", daemon=True).start()
    from serve.cli import main

    main()
