"""After a full warm-up nothing compiles, whatever mix of requests comes; and the counter that says so really counts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxinfer.config import CompileConfig
from jaxinfer.engine.build import Engine
from jaxinfer.observability.compilation import (
    CompilationMonitor,
    RecompilationError,
    use_compilation_cache,
)
from jaxinfer.sampling_params import SamplingParams
from tests.support.engines import Job, ids, run
from tests.support.tiny_models import MIXED, prompt_ids, tiny_model, tiny_settings
from tests.support.tokenizers import ByteTokenizer


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

    def fresh() -> Callable[[jax.Array], jax.Array]:
        def program(x: jax.Array) -> jax.Array:
            return x * (1.0 + 2.0**-19)

        return jax.jit(program)

    x = jnp.zeros(7)
    events: list[str] = []

    def listen(event: str, **_: Any) -> None:
        events.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        with persistent_cache(tmp_path):
            fresh()(x)
            assert "/jax/compilation_cache/cache_hits" not in events
            monitor.arm()
            fresh()(x)
            assert "/jax/compilation_cache/cache_hits" in events
            assert monitor.count == 1
    finally:
        jax.monitoring.unregister_event_listener(listen)


@contextmanager
def persistent_cache(folder: Path) -> Iterator[None]:
    folder_before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    seconds_before = jax.config.jax_persistent_cache_min_compile_time_secs  # type: ignore[attr-defined]
    try:
        use_compilation_cache(str(folder))
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder_before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds_before)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Fully warmed up, with all buckets, two KV groups, and a pool that is too small for four long sequences."""
    settings = tiny_settings(num_blocks=30, max_num_batched_tokens=16, policy="priority")
    compile_config = CompileConfig(warm_up="full", on_recompile="error", cache_dir="none")
    engine = tiny_model(MIXED).engine(
        settings.model_copy(update={"compile": compile_config}), all_buckets=True, tokenizer=ByteTokenizer()
    )
    yield engine
    engine.compilations.close()


FEATURES: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"top_k": 1},
    {"top_p": 0.3, "logprobs": 20},
    {"logprobs": 0, "logprobs_mode": "processed", "top_k": 5},
    {"logprob_token_ids": [1, 2, 300], "logprobs": 3},
    {"prompt_logprobs": 5},
    {"prompt_logprob_token_ids": [[5, -1], [6, 7]], "prompt_logprob_start": 1, "max_tokens": 0},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5},
    {"logit_bias": {5: 4.0, 7: -100}},
    {"allowed_token_ids": list(range(65, 91)), "temperature": 0},
    {"bad_words": ["a", "the end"], "min_tokens": 3},
    {"stop": ["zz"], "stop_token_ids": [70], "min_tokens": 4},
    {"n": 4, "temperature": 1.0},
    {"n": 3, "prompt_logprobs": 0, "repetition_penalty": 1.1, "logprobs": 2},
    {"ignore_eos": True, "max_tokens": 30, "detokenize": False},
)


@pytest.mark.feature(
    "no recompilation",
    "logprobs",
    "prompt logprobs",
    "penalties",
    "bias, allowed ids, bad words",
    "n > 1",
    "sampling",
    "chunked prefill",
)
def test_nothing_compiles_after_warm_up(engine: Engine) -> None:
    """Each feature alone with short and long prompts, then random mixes that arrive, are preempted and aborted."""
    for feature in FEATURES:
        for length in (3, 40):
            run(engine, [Job(ids(prompt_ids(length)), SamplingParams(**{"max_tokens": 5, **feature}))])
    assert engine.compilations.count == 0
    rng = np.random.default_rng(0)
    for _ in range(12):
        jobs = []
        for feature in rng.permutation(len(FEATURES))[:7]:
            prompt = prompt_ids(int(rng.integers(1, 34)), int(rng.integers(3)))
            params = SamplingParams(**{"max_tokens": int(rng.integers(1, 20)), **FEATURES[feature]})
            jobs.append(Job(ids(prompt), params, at=int(rng.integers(12)), priority=int(rng.integers(3))))
        run(engine, jobs)
    assert engine.core.stats.preemptions > 0
    assert engine.core.stats.prefix_hit_tokens > 0
    assert engine.compilations.count == 0


def test_a_compilation_behind_the_back_of_the_engine_is_an_error(engine: Engine) -> None:
    """The engine asks its monitor after each step; this comes last, as the count stays."""
    jax.jit(lambda x: x * (1.0 + 2.0**-18))(np.zeros(3, np.float32))
    with pytest.raises(RecompilationError):
        run(engine, [Job(ids(prompt_ids(3)), SamplingParams(max_tokens=2))])
