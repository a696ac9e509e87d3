"""What the planner says a device holds is what the engine puts there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.model_setup import ModelSetup, allocate_cache, load_weights, set_up_model
from jaxinfer.engine.pipeline_setup import load_stages, stage_setups
from jaxinfer.kv_cache.layout import group_layers
from jaxinfer.models.decoder import kv_specs
from jaxinfer.models.segments import segmented_model
from jaxinfer.planning.described import describe
from jaxinfer.planning.footprint import CacheGroup, StageMemory, stage_memories
from jaxinfer.planning.layouts import Replica
from jaxinfer.planning.parts import model_parts
from pallas_kernels.select import select_ops
from tests.models.tiny_checkpoints import CASES, save

BLOCKS, BLOCK_SIZE = 8, 4
QUICK = ("mistral_window", "deepseek_v3")
"""A windowed model with grouped KV heads, and latents with experts; the others are slow tests."""
EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}
OWN_HEADS = ("deepseek_v2", "deepseek_v3", "phi3_longrope_partial")
"""Cases whose other sizes go with the number of heads that they have."""
LAYOUTS = {
    "qwen3_moe": ({"tensor": 2, "expert": 2},),
    "mixtral": ({"expert": 4}, {"tensor": 2, "expert": 2}),
    "deepseek_v2": ({"expert": 2},),
    "deepseek_v3": ({"tensor": 2, "expert": 2}, {"pipeline": 2}),
}


def set_up(folder: Path, **parallel: int) -> tuple[EngineConfig, ModelSetup]:
    config = EngineConfig.load(
        str(folder),
        {
            "model.dtype": "bfloat16",
            "model.weights": "float",
            "model.tokenizer": "none",
            "model.max_model_len": 32,
            "cache.block_size": BLOCK_SIZE,
            "cache.num_blocks": BLOCKS,
            "kernel.backend": "xla",
            "parallel": parallel,
        },
    )
    return config, set_up_model(config)


def device_bytes(arrays: Any) -> set[int]:
    """What each device holds of these arrays."""
    held: dict[int, int] = {}
    for leaf in jax.tree.leaves(arrays):
        for shard in leaf.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return set(held.values())


def check(folder: Path, parallel: dict[str, int]) -> None:
    config, setup = set_up(folder, **parallel)
    assert setup.dtype == jnp.bfloat16
    parts = model_parts(describe(str(folder)).config)
    memories = stage_memories(parts, Replica(**parallel), "bf16", "bf16")
    if len(memories) == 1:
        assert device_bytes(load_weights(setup)) == {memories[0].weights}
    else:
        stages = stage_setups(setup)
        load_stages(setup, stages)
        for stage, memory in zip(stages, memories, strict=True):
            assert device_bytes(stage.params) == {memory.weights}
        return  # pools of stages are those of the layers below, cut
    cache = allocate_cache(config, setup, (BLOCKS,) * len(setup.windows))
    pools = [(layer.k_NKSh, layer.v_NKSh) for layer in cache]
    assert device_bytes(pools) == {memories[0].cache_per_token * BLOCKS * BLOCK_SIZE}
    for group, (window, cached) in enumerate(zip(setup.windows, memories[0].groups, strict=True)):
        of_group = [pool for pool, of in zip(pools, setup.groups) if of == group]
        assert cached.window == window
        assert device_bytes(of_group) == {cached.bytes_per_token * BLOCKS * BLOCK_SIZE}


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_weights_and_cache_are_what_the_engine_allocates(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU; processors without bfloat16 compute in float32.
    monkeypatch.setattr("jaxinfer.engine.model_setup.compute_dtype", lambda declared, platform: declared)
    save(case, tmp_path, **({} if case in OWN_HEADS else EIGHT_HEADS))
    layouts: tuple[dict[str, int], ...] = ({}, {"tensor": 4}, *LAYOUTS.get(case, ({"pipeline": 2},)))
    for parallel in layouts:
        check(tmp_path, parallel)


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "mixtral-8x7b"])
def test_layers_of_a_kind_stand_for_all(name: str) -> None:
    """One layer of each kind is built; the engine's way to all layers, of as many as are quick to build."""
    config = describe(name).config
    ten = describe_first_layers(config, 6)
    parts = model_parts(ten)
    model = segmented_model(
        ten,
        select_ops("xla", "cpu", strict=False),
        jnp.dtype(jnp.bfloat16),
        param_dtype=jnp.dtype(jnp.bfloat16),
        max_model_len=ten.max_position,
        layers_per_segment=5,
    )
    assert parts.num_parameters == sum(struct.size for struct in model.shapes.values())
    assert sum(1 for _ in model.shapes) == sum(count for count, _ in parts.stage(0, 6))


def describe_first_layers(config: Any, count: int) -> Any:
    moe = config.moe and replace(config.moe, sparse_layers=config.moe.sparse_layers[:count])
    windows, ropes = config.windows[:count], config.ropes[:count]
    return replace(config, num_layers=count, windows=windows, ropes=ropes, moe=moe)


@pytest.mark.parametrize(
    ("name", "billions", "kib_per_token"),
    [
        # Published: the models' cards and reports; 70 KB a token for DeepSeek-V3 (arXiv:2505.09343, table 1: 70.272 KB,
        # Llama-3.1 405B 516.096 KB).
        ("llama-3-8b", 8.03, 128),
        ("llama-3-70b", 70.55, 320),
        ("llama-3-405b", 405.85, 504),
        ("deepseek-v3", 671.03, 68.625),
        ("qwen3-30b-a3b", 30.53, 96),
        ("qwen3-235b-a22b", 235.09, 188),
        ("mixtral-8x7b", 46.70, 128),
    ],
)
def test_known_models_have_their_published_sizes(name: str, billions: float, kib_per_token: float) -> None:
    parts = model_parts(describe(name).config)
    assert parts.num_parameters / 1e9 == pytest.approx(billions, abs=0.01)
    (memory,) = stage_memories(parts, Replica(), "bf16", "bf16")
    assert memory.cache_per_token / 1024 == kib_per_token
    (half,) = stage_memories(parts, Replica(), "bf16", "fp8")
    assert half.cache_per_token * 2 == memory.cache_per_token


def test_kv_heads_are_repeated_but_latents_are_whole() -> None:
    """As in sharding/axes.py: 8 KV heads on 16 devices take one head each; every device has all latents."""
    llama, deepseek = (
        model_parts(describe("llama-3-405b").config),
        model_parts(describe("deepseek-v3").config),
    )
    per_token = {
        tensor: stage_memories(llama, Replica(tensor), "bf16", "bf16")[0].cache_per_token
        for tensor in (1, 8, 16)
    }
    assert per_token[1] == 8 * per_token[8] == 8 * per_token[16]
    latents = {
        tensor: stage_memories(deepseek, Replica(tensor), "bf16", "bf16")[0].cache_per_token
        for tensor in (1, 16)
    }
    assert latents[1] == latents[16]


@pytest.mark.parametrize(
    ("name", "replica", "message"),
    [
        ("llama-3-8b", Replica(tensor=3), "8 kv_heads cannot be spread over 3 devices: 3 does not divide 8"),
        ("mixtral-8x7b", Replica(expert=3), "cannot be spread over 3 devices"),
        ("llama-3-8b", Replica(pipeline=33), "parallel.pipeline is 33, but the model has 32 layers only"),
    ],
)
def test_limits_are_those_of_the_engine(name: str, replica: Replica, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stage_memories(model_parts(describe(name).config), replica, "bf16", "bf16")


def test_a_window_bounds_what_a_sequence_takes() -> None:
    memory = StageMemory(0.0, (CacheGroup(None, 2.0), CacheGroup(100, 10.0)))
    assert memory.sequence_bytes(64, 32, 16) == 64 * 12
    assert memory.sequence_bytes(65, 32, 16) == 80 * 12
    grown = memory.sequence_bytes(10_000, 32, 16)
    assert grown == 10_000 * 2 + 160 * 10  # 100 seen, 32 in flight, 16 at the ends, in whole blocks
    assert memory.groups[1].bytes_read(10_000) == 1000
    windows, groups = group_layers(kv_specs(describe("llama-3-8b").config))
    assert (windows, set(groups)) == ((None,), {0})
