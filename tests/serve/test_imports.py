"""What must be quick to start does not load JAX."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["serve.cli", "serve.app", "serve.run", "serve.process.client", "serve.bench.serving"]
)
def test_front_ends_do_not_load_jax(module):
    code = f"import {module}, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
