"""A process that comes late to a sum over two: ``python -m tests.support.late_rank RANK PORT SECONDS``.

Rank 1 is ``SECONDS`` late for the second sum. Prints what the sum is.
"""

import os
import sys
import time

import jax
import numpy as np
from jax import lax

from sharding.layout import WHOLE
from sharding.mesh import make_layout
from sharding.processes import join_processes, shared_devices


def main() -> None:
    rank, port, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    join_processes("127.0.0.1", port, 2, rank, 600)
    layout = make_layout(shared_devices(2), 2, 1)
    connect = layout.compile_sums()
    program = jax.jit(layout.spread(lambda x: lax.psum(x, "tensor"), (WHOLE,), WHOLE))
    connect()
    if rank:
        time.sleep(seconds)
    print(np.asarray(program(np.ones(3, np.float32))).tolist(), flush=True)
    os._exit(0)  # nobody waits for the other one


if __name__ == "__main__":
    main()
