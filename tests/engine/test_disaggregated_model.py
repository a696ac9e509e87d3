"""A real model in two engines of one process, with their loops on threads: tokens and blocks as in one engine."""

import asyncio
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.build import Engine
from jaxinfer.kv_transfer.connector import KVConnector
from jaxinfer.kv_transfer.layout import BlockLayout
from jaxinfer.runner.jax_runner import JaxRunner
from sharding.mesh import make_layout, make_layouts
from tests.support.engines import Job, ids, run, token_params
from tests.support.tiny_models import MIXED, TinyModel, make_model, prompt_ids, tiny_model, tiny_settings
from tests.support.two_engines import (
    NIXL,
    TOKENS,
    TRANSPORTS,
    MakeEngine,
    complete,
    two_engines,
    until_clean,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [prompt_ids(n, n) for n in (45, 30, 41, 5)]
"""The last one is too short for another engine."""


def full_blocks(prompt: list[int]) -> int:
    return (len(prompt) - 1) // 4


def wanted_blocks(prompt: list[int]) -> int:
    """With the last one, which need not be full."""
    return -(-(len(prompt) - 1) // 4)


def alone(model: TinyModel, **options: Any) -> list[list[int]]:
    params = token_params(max_tokens=TOKENS, ignore_eos=True)
    jobs = [Job(ids(prompt), params) for prompt in PROMPTS]
    outputs = run(model.engine(tiny_settings(chunk_size=8), **options), jobs)
    return [list(output.outputs[0].token_ids) for output in outputs]


async def serve_all(
    here: TinyModel, there: TinyModel, options: dict[str, Any] | None = None, **roles: Any
) -> list[list[int]]:
    def make(model: TinyModel) -> MakeEngine:
        return lambda settings, connector: model.engine(settings, connector=connector, **(options or {}))

    settings = tiny_settings(chunk_size=8)
    async with two_engines(make(here), make(there), settings, **roles) as (decode, prefill):
        tasks = [complete(decode, str(i), prompt) for i, prompt in enumerate(PROMPTS)]
        tokens = list(await asyncio.gather(*tasks))
        await until_clean(decode, prefill)
        stats = decode.snapshot().transfers
        assert (stats.fetches, stats.fetches_failed) == (3, 0)
        assert stats.received_bytes == prefill.snapshot().transfers.sent_bytes
        if here.config.windows == (None, None):
            assert stats.received_blocks == sum(map(wanted_blocks, PROMPTS[:3]))
            check_contents(decode.engine, prefill.engine, exact="quantization" not in roles)
        if not options and not roles.get("quantization"):
            K, h = here.config.num_kv_heads, here.config.head_dim
            per_block = 2 * 2 * K * 4 * h * 4  # layers, K and V, slots, float32
            if here.config.windows == (None, None):
                assert stats.received_bytes == stats.received_blocks * per_block
    return tokens


def check_contents(decode: Engine, prefill: Engine, exact: bool) -> None:
    """What came is what was computed there."""
    for prompt in PROMPTS[:3]:
        for x, y in zip(contents(decode, prompt), contents(prefill, prompt), strict=True):
            np.testing.assert_allclose(x, y, atol=0.0 if exact else 0.05, rtol=0)


def contents(engine: Engine, prompt: list[int]) -> list[np.ndarray]:
    """K and V of a prompt's cached full blocks, with whole logical heads."""
    runner = engine.runner
    assert isinstance(runner, JaxRunner)
    (seq,) = engine.inputs.process("look", ids([*prompt, 3]), token_params())
    held = list(engine.core.scheduler.kv.find(seq).tables[0][: full_blocks(prompt)])
    assert len(held) == full_blocks(prompt)
    pools = [np.asarray(pool)[held] for kv in runner.kv_cache for pool in (kv.k_NKSh, kv.v_NKSh)]
    return [pool[:, :: pool.shape[1] // 2].astype(np.float32) for pool in pools]


@pytest.mark.feature("disaggregation", "prefix cache", "chunked prefill", "overlap")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_engines_say_what_one_says(transport) -> None:
    model = tiny_model()
    assert asyncio.run(serve_all(model, model, transport=transport)) == alone(model)


@pytest.mark.feature("disaggregation", "tensor parallel")
@pytest.mark.parametrize(("here", "there"), [(2, 1), (1, 4)], ids=["1 to 2", "4 to 1"])
def test_engines_may_have_different_numbers_of_devices(here, there) -> None:
    """With two KV heads, four devices hold each head twice."""

    def model(devices: int) -> TinyModel:
        if devices == 1:
            return tiny_model()
        return make_model(tiny_model().config, 0, make_layout(jax.devices(), devices, 1))

    assert asyncio.run(serve_all(model(here), model(there))) == alone(tiny_model())


@pytest.mark.feature("disaggregation", "quantized KV cache")
def test_a_cache_of_one_byte_travels_as_it_is() -> None:
    model = tiny_model()
    options = {"cache_dtype": "fp8_e4m3"}
    assert asyncio.run(serve_all(model, model, options)) == alone(model, **options)


@pytest.mark.feature("disaggregation")
@pytest.mark.parametrize("transport", ["host", NIXL])
def test_blocks_that_are_rounded_on_their_way(transport) -> None:
    model = tiny_model()
    tokens = asyncio.run(serve_all(model, model, transport=transport, quantization="int8"))
    same = sum(x == y for a, b in zip(tokens, alone(model)) for x, y in zip(a, b))
    assert same >= 18  # of 24: it is lossy


@pytest.mark.feature("disaggregation", "sliding window")
def test_layers_with_windows() -> None:
    model = tiny_model(MIXED)
    assert asyncio.run(serve_all(model, model)) == alone(model)


@pytest.mark.feature("disaggregation", "overlap")
@pytest.mark.parametrize("transport", ["host", "jax"])
def test_after_the_warm_up_nothing_compiles(transport) -> None:
    """Arrays that come with the transport "jax" belong to a device, so all others of the engine have to as well."""
    layout = make_layouts(jax.devices(), 1, 1, 1, committed=transport == "jax")[0]
    model = make_model(tiny_model().config, 0, layout)

    def make(settings: EngineConfig, connector: Callable[[BlockLayout], KVConnector]) -> Engine:
        compile_all = settings.compile.model_copy(update={"warm_up": "full"})
        return model.engine(settings.model_copy(update={"compile": compile_all}), connector=connector)

    async def main() -> None:
        settings = tiny_settings(chunk_size=8)
        async with two_engines(make, make, settings, transport=transport) as (decode, prefill):
            before = [
                client.snapshot().compilations for client in (decode, prefill)
            ]  # one saw the other's warm-up
            for i, prompt in enumerate(PROMPTS):
                await complete(decode, str(i), prompt)
            assert decode.snapshot().transfers.received_blocks
            assert [client.snapshot().compilations for client in (decode, prefill)] == before

    asyncio.run(main())
