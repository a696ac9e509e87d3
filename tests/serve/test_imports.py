"""What must be quick to start loads neither JAX nor Ray."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "serve.cli",
        "serve.app",
        "serve.run",
        "serve.process.client",
        "serve.bench.serving",
        "serve.replicas.app",
        "serve.replicas.run",
    ],
)
def test_front_ends_do_not_load_jax_or_ray(module):
    code = f"import {module}, sys; sys.exit('jax' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
