"""After a full warm-up nothing compiles, whatever mix of requests comes; and the counter that says so really counts."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.build import Engine
from jaxinfer.observability.compilation import CompilationMonitor, RecompilationError
from jaxinfer.sampling_params import SamplingParams
from tests.support.engines import Job, ids, run
from tests.support.tiny_models import MIXED, prompt_ids, tiny_model, tiny_settings


@pytest.fixture
def monitor() -> Iterator[CompilationMonitor]:
    monitor = CompilationMonitor("error")
    yield monitor
    monitor.close()


def test_monitor_counts_compilations_after_arming(monitor: CompilationMonitor) -> None:
    """The positive control: without it a counter that hears nothing would pass for an engine that compiles nothing."""
    scale = 1.0 + 2.0**-20  # a constant that no other program holds

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        return x * scale

    program(jnp.zeros(3))
    assert monitor.count == 0, "nothing counts before it is armed"
    x = jnp.zeros(5)
    monitor.arm()
    program(jnp.zeros(3))
    assert monitor.count == 0, "a compiled program runs without compiling"
    monitor.check()
    program(x)
    assert monitor.count == 1
    with pytest.raises(RecompilationError, match="1 program"):
        monitor.check()
    monitor.check()  # reported once


def test_hits_of_the_persistent_cache_count(monitor: CompilationMonitor, tmp_path: Path) -> None:
    """Reading a program back takes time in the middle of a step, so it is a compilation to the monitor."""
    scale = 1.0 + 2.0**-19

    def program(x: jax.Array) -> jax.Array:
        return x * scale

    x = jnp.zeros(7)
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()
        jax.jit(program)(x)
        assert list(tmp_path.iterdir()), "the program was not stored"
        jax.clear_caches()
        monitor.arm()
        jax.jit(program)(x)
        assert monitor.count == 1
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()
