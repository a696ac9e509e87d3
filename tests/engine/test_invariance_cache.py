"""K and V on the device: windows, padding, block 0, and cached blocks, with the real runner on Tiny LM.

The reference is a dense float64 forward with masks and without any cache.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.batch.builder import StepArrays
from jaxinfer.engine.build import Engine
from jaxinfer.kv_cache.layout import KVCache, LayerKV, group_layers
from jaxinfer.models.decoder import kv_specs
from jaxinfer.outputs import RequestOutput
from jaxinfer.runner.jax_runner import JaxRunner
from jaxinfer.runner.protocol import StepHandle
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduler.plan import StepPlan
from tests.support.engines import Job, ids, run
from tests.support.tiny_models import (
    FULL,
    MIXED,
    WINDOWED,
    TinyModel,
    Windows,
    prompt_ids,
    tiny_model,
    tiny_settings,
)
from tests.support.variants import variants

pytestmark = pytest.mark.kernels

BOUND = 5e-5
WINDOWS: dict[str, Windows] = {"full": FULL, "mixed": MIXED, "windowed": WINDOWED}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": 0}


class Watched:
    """A runner that looks at the KV cache: blocks that no row of a step owns must keep every bit.

    Args:
        inner: the real runner.
        groups: KV group of each layer.
        canary: what block 0 is filled with before each step; None leaves it alone.
    """

    def __init__(self, inner: JaxRunner, groups: tuple[int, ...], canary: float | None) -> None:
        self.inner = inner
        self.engine: Engine | None = None
        self.steps: list[StepPlan] = []
        self.filed: dict[tuple[bytes, int, int], list[np.ndarray]] = {}
        self._groups = groups
        self._canary = canary

    def dispatch(self, plan: StepPlan, arrays: StepArrays) -> StepHandle:
        assert plan.num_tokens > 0
        assert (arrays.samples.tokens < plan.num_tokens).all(), (
            "a row takes logits that the step does not have"
        )
        self.steps.append(plan)
        if self._canary is not None:
            self.inner._kv_cache = _fill_block_zero(self.inner.kv_cache, self._canary)
        before = _to_host(self.inner.kv_cache)
        handle = self.inner.dispatch(plan, arrays)
        after = _to_host(self.inner.kv_cache)
        for layer, group in enumerate(self._groups):
            owned = {block for row in plan.rows for block in row.seq.tables[group]}
            others = sorted(set(range(1, before[layer][0].shape[0])) - owned)
            for x, y in zip(before[layer], after[layer]):
                assert x[others].tobytes() == y[others].tobytes(), (
                    "a step changed a block that no row of it owns"
                )
        self._check_filed(after)
        return handle

    def _check_filed(self, pools: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Compares each cached block with what it held when it was first seen to be cached."""
        assert self.engine is not None
        cache = self.engine.core.scheduler.kv.cache
        seen = {}
        for group, owner in enumerate(cache._owner):
            for block, node in owner.items():
                layers = [i for i, g in enumerate(self._groups) if g == group]
                content = [x[block].copy() for i in layers for x in pools[i]]
                key = (node.digest, group, block)
                for x, y in zip(self.filed.get(key, content), content):
                    assert x.tobytes() == y.tobytes(), "a cached block was changed"
                seen[key] = content
        self.filed = seen


def _to_host(cache: KVCache) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.array(kv.k_NKSh), np.array(kv.v_NKSh)) for kv in cache]


def _fill_block_zero(cache: KVCache, value: float) -> KVCache:
    return tuple(
        LayerKV(kv.k_NKSh.at[0].set(value), kv.v_NKSh.at[0].set(value), kv.k_scale_K, kv.v_scale_K)
        for kv in cache
    )


def watched(model: TinyModel, canary: float | None = None, **options: Any) -> tuple[Engine, Watched]:
    made: list[Watched] = []

    def wrap(runner: JaxRunner) -> Watched:
        made.append(Watched(runner, group_layers(kv_specs(model.config))[1], canary))
        return made[0]

    engine = model.engine(tiny_settings(**options), wrap=wrap)
    made[0].engine = engine
    return engine, made[0]


def check(model: TinyModel, prompt: Sequence[int], output: RequestOutput, count: int) -> None:
    """The output is the greedy continuation of the dense forward, with its log-probabilities."""
    choice = output.outputs[0]
    expected = model.greedy(prompt, count)
    assert choice.token_ids == expected
    logits_TV = model.logits([*prompt, *expected])[len(prompt) - 1 : -1]
    logprobs_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    assert isinstance(choice.logprobs, list)
    for i, token in enumerate(expected):
        assert abs(choice.logprobs[i][token].logprob - logprobs_TV[i, token]) <= BOUND


def greedy_job(prompt: Sequence[int], count: int, at: int = 0) -> Job:
    return Job(ids(prompt), SamplingParams(max_tokens=count, **GREEDY), at=at)


@pytest.mark.feature("sliding window", "prefix cache", "chunked prefill", "overlap")
@pytest.mark.parametrize(
    ("layers", "chunk", "overlap"),
    variants(
        product(WINDOWS, [None, 4, 7], [0, 1]),
        quick=[
            ("full", 4, 1),
            ("mixed", None, 1),
            ("mixed", 7, 0),
            ("windowed", None, 0),
            ("windowed", 4, 1),
        ],
    ),
)
def test_kvc_06_windows(layers: str, chunk: int | None, overlap: int) -> None:
    """One after the other on one engine: a prompt of 24 with 12 output tokens, the same again, its first 8, its first
    12 with other ids, the last id changed, and lengths around the window; block 4, window 8."""
    model = tiny_model(WINDOWS[layers])
    engine, watch = watched(model, chunk_size=chunk, overlap=overlap)
    prompt = prompt_ids(24, 1)
    changed = [*prompt[:-1], prompt[-1] + 1]
    prompts = [prompt, prompt, prompt[:8], [*prompt[:12], *prompt_ids(7, 5)], changed]
    for text in prompts:
        check(model, text, run(engine, [greedy_job(text, 12)])[0], 12)
    for length in (7, 8, 9, 16):
        for text in (prompt_ids(length, length), prompt_ids(length, length)):
            check(model, text, run(engine, [greedy_job(text, 3)])[0], 3)
    assert watch.filed, "nothing was ever cached"
    assert engine.core.stats.prefix_hit_tokens > 24


def test_kvc_06_window_bounds_the_blocks_of_a_sequence() -> None:
    """All layers windowed (8, block 4): after prefill at most window / block + 1 blocks are held between steps."""
    engine, _ = watched(tiny_model(WINDOWED), overlap=0, chunk_size=8)
    core = engine.core
    sequences = engine.inputs.process("0", ids(prompt_ids(24)), SamplingParams(max_tokens=12, **GREEDY))
    core.add(sequences)
    while core.has_work:
        core.step()
        if sequences[0].output_token_ids:
            assert sum(1 for block in sequences[0].tables[0] if block) <= 8 // 4 + 1


@pytest.mark.parametrize(
    ("layers", "canary"),
    variants(product(["full", "mixed"], [np.nan, 1e38]), quick=[("full", 1e38), ("mixed", np.nan)]),
)
def test_kvc_08_block_zero_reaches_no_output(layers: str, canary: float) -> None:
    """Block 0 holds NaN or 1e38 before every step: one real row among padding, three rows of lengths 1, 5 and 9, a
    prefix hit whose blocks before the window are gone, and 100 steps of padded batches."""
    model = tiny_model(WINDOWS[layers])
    engine, watch = watched(model, canary)
    check(model, prompt_ids(5, 1), run(engine, [greedy_job(prompt_ids(5, 1), 6)])[0], 6)
    prompts = [prompt_ids(1, 1), prompt_ids(5, 2), prompt_ids(9, 3)]
    for _ in range(4):
        outputs = run(engine, [greedy_job(p, 12, at=i) for i, p in enumerate(prompts)])
        for text, output in zip(prompts, outputs):
            check(model, text, output, 12)
    long = prompt_ids(24, 1)
    for _ in range(2):
        check(model, long, run(engine, [greedy_job(long, 30)])[0], 30)
    assert len(watch.steps) > 100


def test_kvc_08_pool_of_four_blocks() -> None:
    """Three usable blocks: sequences of 5 to 9 tokens take turns, and nobody gets block 0."""
    model = tiny_model()
    engine, _ = watched(model, np.nan, num_blocks=4)
    prompts = [prompt_ids(5, 1), prompt_ids(6, 22), prompt_ids(3, 5)]
    outputs = run(engine, [greedy_job(p, 4) for p in prompts])
    for text, output in zip(prompts, outputs):
        check(model, text, output, 4)


def test_stale_content_of_released_blocks_reaches_no_output() -> None:
    """Blocks that left the window of a sequence are overwritten with NaN by whoever gets them next: the sequence that
    had them goes on undisturbed."""
    model = tiny_model(MIXED)
    prompt = prompt_ids(24, 1)
    engine, watch = watched(model, overlap=0, prefix_caching=False)
    core = engine.core
    sequences = engine.inputs.process("0", ids(prompt), SamplingParams(max_tokens=12, **GREEDY))
    core.add(sequences)
    tokens: list[int] = []
    while core.has_work:
        tokens += [t for delta in core.step() for t in delta.token_ids]
        owned = [{block for block in table if block} for table in sequences[0].tables]
        watch.inner._kv_cache = _poison_others(watch.inner.kv_cache, (1, 0), owned)
    assert tokens == model.greedy(prompt, 12)


def _poison_others(cache: KVCache, groups: tuple[int, ...], owned: list[set[int]]) -> KVCache:
    poisoned = []
    for kv, group in zip(cache, groups):
        free = jnp.array([b not in owned[group] for b in range(kv.k_NKSh.shape[0])])[:, None, None, None]
        k, v = (jnp.where(free, jnp.nan, x) for x in (kv.k_NKSh, kv.v_NKSh))
        poisoned.append(LayerKV(k, v, kv.k_scale_K, kv.v_scale_K))
    return tuple(poisoned)
