"""The engine on an image that has JAX and NumPy only: what stands in for other packages must keep up with it."""

import subprocess
import sys

from tests.benchmarks_gpu.test_processes import BARE, ROOT

IMPORTS = """
import sys
from benchmarks.gpu import stand_ins
stand_ins.hide(sys.argv[1:])
assert set(stand_ins.install()) == set(stand_ins.INERT) | set(stand_ins.IMITATED)
import benchmarks.gpu.steps, benchmarks.gpu.throughput
"""


def test_everything_that_is_measured_imports_on_a_bare_image() -> None:
    command = [sys.executable, "-c", IMPORTS, *BARE, "rich", "optax", "orbax"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
